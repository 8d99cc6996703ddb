// TwELL in tensors, as `TwELL.stored` in kernels/layout.py returns it, as launches take it.
#pragma once

#include "common/bindings.h"
#include "packed/packed.h"

namespace twell {

inline Packed packed_of(const Tensor& heads, const Maybe& tails, const Maybe& spill_index, const Tensor& spill,
                        int64_t tile, int64_t slots) {
  Packed packed{};
  packed.heads = as<uint32_t>(heads), packed.tails = as<uint32_t>(tails), packed.spill_index = as<int>(spill_index);
  packed.spill = address(spill), packed.tiles = heads.size(1), packed.tile = tile, packed.slots = slots;
  packed.head_words = heads.size(2);
  packed.spill_bytes = spill.scalar_type() == torch::headeronly::ScalarType::Float ? 4 : 2;
  return packed;
}

}  // namespace twell
