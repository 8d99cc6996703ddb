// What a call writes in the end: y, and what the caller has added to it.
#pragma once

#include "common/convert.cuh"
#include "hopper/params.h"

namespace twell::hopper {

// Writes adjacent outputs of a row from `out` on, a pair (uint32_t) or eight (uint4), and adds to them first what the call
// adds.
template <typename T, typename Outputs>
__device__ __forceinline__ void store_outputs_of(const Ffn& f, int row, int out, Outputs values) {
  const int64_t at = (static_cast<int64_t>(row) * f.d_model + out) * sizeof(T) / sizeof(Outputs);
  if (f.added != nullptr) values = add_pairs<T>(values, static_cast<const Outputs*>(f.added)[at]);
  static_cast<Outputs*>(f.y)[at] = values;
}

}  // namespace twell::hopper
