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

// Choices of `rows16`. The first two are hints, on which no result depends: what is prefetched into the L2 for others.
struct Rows16Choices {
  // not the down weights of a group that fires nearly whole: those of all groups may be more than the L2 holds
  bool leave_dense;
  bool next_wave;    // the gate weights of the group that comes after a CTA's own on its multiprocessor
  bool wide_groups;  // groups of kWideGroup where that makes one wave of two
};
constexpr Rows16Choices kChosen{true, false, true};  // in force; a call's stages can turn each around

// Sets the choices of a call on so many multiprocessors. turned: those that are not as in kChosen
inline void choose_rows16(Ffn& f, Rows16Choices turned, int processors) {
  f.leaves_dense = kChosen.leave_dense != turned.leave_dense;
  f.next_group = kChosen.next_wave != turned.next_wave ? processors : 0;
  const bool pays = f.d_ff > kGroupNeurons * processors && f.d_ff <= kWideGroup * processors;
  f.wide_groups = pays && kChosen.wide_groups != turned.wide_groups;
}

}  // namespace twell::hopper
