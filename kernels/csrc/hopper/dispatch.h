// Which of three paths a call without a plan takes.
#pragma once

#include "hopper/params.h"

namespace twell::hopper {

enum class Path { kThin, kFew, kMid };

// A multiprocessor takes one CTA of `thin` or `few` at a time. Where those are more than two waves or one, `mid` is faster, whose tiles are as
// wide as makes waves full. Between one wave and two `mid` is ahead where all fires, but `thin` by more where little does.
inline Path path_of(const Ffn& f, int processors) {
  const int wave = kFewNeurons * processors;
  if (f.rows <= kThinRows && f.d_ff <= 2 * wave) return Path::kThin;
  return f.rows <= kFewRows && f.d_ff <= wave ? Path::kFew : Path::kMid;
}

}  // namespace twell::hopper
