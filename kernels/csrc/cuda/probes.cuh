// What is computed from the masks on request: the probes, and TwELL of any layout.
#pragma once

#include "common/convert.cuh"
#include "common/probes.cuh"
#include "cuda/params.h"

namespace twell::cuda {

constexpr int kCountThreads = 256;
constexpr int kSumColumns = 2048, kSumWords = kSumColumns / 32, kSumRows = 1024;  // to a CTA of the neurons' sums
using NeuronSums = Sums<kSumColumns>;
static_assert(kSumRows <= NeuronSums::kRows);

static __global__ void __launch_bounds__(kCountThreads) count_rows(const Ffn f, const Counts out, int tile) {
  extern __shared__ uint32_t shared[];
  const int many = tile / 32;  // words of a tile
  count_tiles(out, f.finite, f.rows, (f.words + many - 1) / many, tile, shared, [&](int row, int which) {
    const uint32_t* masks = f.masks + static_cast<int64_t>(row) * f.words;
    int count = 0;
    for (int w = which * many; w < min(f.words, (which + 1) * many); ++w) count += __popc(masks[w]);
    return count;
  });
  if (f.used != nullptr)
    for (int row = blockIdx.x * kCountThreads + threadIdx.x; row < f.rows; row += gridDim.x * kCountThreads)
      if (!f.finite[row]) f.used[row] = 0;
}

template <typename T>
__global__ void __launch_bounds__(kCountThreads) count_neurons(const Ffn f, const Counts out) {
  extern __shared__ uint4 raw[];
  NeuronSums& sums = *reinterpret_cast<NeuronSums*>(raw);
  sums.begin();
  const int first = blockIdx.y * kSumWords, w = first + threadIdx.x % kSumWords;
  const int end = min(f.rows, (static_cast<int>(blockIdx.x) + 1) * kSumRows);
  for (int row = blockIdx.x * kSumRows + threadIdx.x / kSumWords; row < end; row += kCountThreads / kSumWords) {
    if (w >= f.words || !f.finite[row] || (out.counted != nullptr && !out.counted[row])) continue;
    const uint32_t mask = f.masks[static_cast<int64_t>(row) * f.words + w];
    if (mask == 0) continue;
    const uint16_t* values = static_cast<const uint16_t*>(f.values) + static_cast<int64_t>(row) * f.pitch + 32 * w;
    const int token = out.tokens[row], sequence = out.sequences[row];
    for (uint32_t left = mask; left; left &= left - 1) {
      const int bit = __ffs(left) - 1;
      sums.add(32 * (w - first) + bit, half_of<T>(values[bit], 0), token, sequence);
    }
  }
  sums.finish(out, 32 * first);
}

// A lane takes one word of a row's mask, so a tile of 32 to 512 columns is 1 to 16 neighbouring lanes. They write its
// count, its used slots, zeros in the others, and zeros in `values` where a tile past its slots has none.
static __global__ void __launch_bounds__(kCountThreads) pack(const Ffn f, const Packed p) {
  const int many = p.tile / 32, wide = (p.tiles * many + 31) / 32;  // words of a tile; warps for a row
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * (kCountThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, w = static_cast<int>(unit % wide) * 32 + lane, tile = w / many,
            place = lane % many;
  const int64_t row = unit / wide;
  if (row >= f.rows) return;
  const bool there = tile < p.tiles;
  const uint32_t mask = w < f.words && f.finite[row] ? f.masks[row * f.words + w] : 0;
  int upto = __popc(mask);
  for (int step = 1; step < many; step *= 2) {
    const int other = __shfl_up_sync(~0u, upto, step, many);
    if (place >= step) upto += other;
  }
  const int count = __shfl_sync(~0u, upto, many - 1, many), slots = p.words - 1;
  if (!there) return;
  const int64_t at = row * p.tiles + tile;
  uint32_t* out = p.out + at * p.words;
  uint16_t* values = static_cast<uint16_t*>(f.values) + row * f.pitch + 32 * w;
  int slot = upto - __popc(mask);
  for (uint32_t left = mask; left && slot < slots; left &= left - 1, ++slot) {
    const int bit = __ffs(left) - 1;
    out[1 + slot] = (32 * place + bit) | static_cast<uint32_t>(values[bit]) << 16;
  }
  for (int i = count + place; i < slots; i += many) out[1 + i] = 0;
  if (place == 0) {
    out[0] = count;
    p.spill_index[at] = count > slots ? static_cast<int>(at) : -1;
  }
  if (count > slots)
    for (int i = 0; i < 4; ++i)
      if ((mask >> (8 * i) & 0xffu) == 0) reinterpret_cast<uint4*>(values)[i] = make_uint4(0, 0, 0, 0);
}

}  // namespace twell::cuda
