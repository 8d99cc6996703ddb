// Chooses one of three paths for a call without a plan.
#pragma once

#include "hopper/params.h"

namespace twell::hopper {

enum class Path { kRows16, kRows64, kTiled };

// A multiprocessor runs one CTA of `rows16` or `rows64` at a time. If those would be more than two waves or one,
// `tiled` is faster, whose tiles are as wide as makes waves full. Between one wave and two, `tiled` is faster where all
// neurons fire, but `rows16` by a larger margin where few do.
inline Path path_of(const Ffn& f, int processors) {
  const int wave = kGroupNeurons * processors;
  if (f.rows <= kRows16Max && f.d_ff <= 2 * wave) return Path::kRows16;
  return f.rows <= kRows64Max && f.d_ff <= wave ? Path::kRows64 : Path::kTiled;
}

// What `rows16_gate_up` prefetches into the L2 for others: hints, on which no result depends.
struct Hints {
  bool leave_dense;  // not the down weights of a group that fires nearly whole: those of all groups may be more than the L2 holds
  bool next_wave;    // the gate weights of the group that comes after a CTA's own on its multiprocessor
};
constexpr Hints kHints{false, false};  // in force; a call's stages can turn each around

// Sets the hints of a call on so many multiprocessors. turned: those that are not as in kHints
inline void set_hints(Ffn& f, Hints turned, int processors) {
  f.leaves_dense = kHints.leave_dense != turned.leave_dense;
  f.next_group = kHints.next_wave != turned.next_wave ? processors : 0;
}

}  // namespace twell::hopper
