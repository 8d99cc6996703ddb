// What a call writes in the end: y, and what the caller has added to it.
#pragma once

#include "common/convert.cuh"
#include "hopper/params.h"

namespace twell::hopper {

// What the call adds to adjacent outputs of a row from `out` on: a pair (uint32_t) or eight (uint4).
template <typename Outputs>
__device__ __forceinline__ Outputs added_to(const Ffn& f, int row, int out) {
  if (f.added == nullptr) return {};
  return static_cast<const Outputs*>(f.added)[(static_cast<int64_t>(row) * f.d_model + out) * 2 / sizeof(Outputs)];
}

// Writes those outputs. added: what `added_to` gave, which is best read some time before
template <typename T, typename Outputs>
__device__ __forceinline__ void store_with(const Ffn& f, int row, int out, Outputs added, Outputs values) {
  if (f.added != nullptr) values = add_pairs<T>(values, added);
  static_cast<Outputs*>(f.y)[(static_cast<int64_t>(row) * f.d_model + out) * 2 / sizeof(Outputs)] = values;
}

}  // namespace twell::hopper
