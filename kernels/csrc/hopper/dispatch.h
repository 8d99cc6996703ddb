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

}  // namespace twell::hopper
