// Ops that take structs: torch hands over dozens of positions, and each fills a member that has a name and a comment.
//
//   struct Arguments { using Fields = Types<Tensor, bool>; Tensor x; bool counts; };
//   void op(Arguments a) { … }
//   m.impl("op", TORCH_BOX((&ByPosition<op, Arguments>::call)));
#pragma once

#include <utility>

namespace twell {

// A list of types.
template <typename... Type>
struct Types {};

template <typename... First, typename... Second, typename... More>
constexpr auto joined(Types<First...>, Types<Second...>, More... more) {
  if constexpr (sizeof...(More) == 0)
    return Types<First..., Second...>{};
  else
    return joined(Types<First..., Second...>{}, more...);
}

// What TORCH_BOX takes in place of run(Arguments): torch hands over positions, and they fill the members of Arguments,
// and of the structs in it, one after the other. Arguments::Fields: the types of all of them, in that order, which is
// the order of the op's schema.
template <auto run, typename Arguments, typename Fields = typename Arguments::Fields>
struct ByPosition;
template <auto run, typename Arguments, typename... Field>
struct ByPosition<run, Arguments, Types<Field...>> {
  static auto call(Field... field) { return run(Arguments{std::move(field)...}); }
};

}  // namespace twell
