// The probes, read from the words: what fired, a row and a neuron.
#pragma once

#include "common/counts.cuh"
#include "hopper/plan.cuh"

namespace twell::hopper {

constexpr int kCountThreads = 512;
constexpr int kSumTiles = Sums::kColumns / kTile;  // to a CTA of the neurons' sums

static __global__ void __launch_bounds__(kCountThreads) count_rows(const Ffn f, const Counts out) {
  __shared__ uint32_t histograms[2 * (kTile + 1)];
  count_tiles(out, f.finite, f.rows, f.tiles, kTile, histograms, [&](int row, int tile) {
    return static_cast<int>(f.heads[(static_cast<int64_t>(row) * f.tiles + tile) * kHead] & kCount);
  });
}

template <typename T>
__global__ void __launch_bounds__(kCountThreads) count_neurons(const Ffn f, const Counts out) {
  extern __shared__ uint4 raw[];
  Sums& sums = *reinterpret_cast<Sums*>(raw);
  const int tile0 = blockIdx.y * kSumTiles, tile = tile0 + threadIdx.x % kSumTiles;
  sums.begin();
  const int end = min(f.rows, (static_cast<int>(blockIdx.x) + 1) * Sums::kRows);
  for (int row = blockIdx.x * Sums::kRows + threadIdx.x / kSumTiles; row < end; row += kCountThreads / kSumTiles) {
    if (tile >= f.tiles || !f.finite[row] || (out.counted != nullptr && !out.counted[row])) continue;
    const int64_t at = static_cast<int64_t>(row) * f.tiles + tile;
    const uint32_t *head = f.heads + at * kHead, *tail = f.tails + at * kTail - kHead;
    const uint32_t count = head[0];
    if ((count & kCount) == 0) continue;
    const int token = out.tokens[row];
    const uint32_t sequence = out.sequences[row];
    const auto add = [&](int column, uint32_t bits) { sums.add(column, half_of<T>(bits, 0), token, sequence); };  // of the CTA's 2048
    const int base = threadIdx.x % kSumTiles * kTile;
    if (count <= kSlots) {
      const uint4 first = *reinterpret_cast<const uint4*>(head), then = *reinterpret_cast<const uint4*>(head + 4);
      const uint32_t words[kHead] = {first.x, first.y, first.z, first.w, then.x, then.y, then.z, then.w};
#pragma unroll
      for (uint32_t i = 1; i < kHead; ++i)
        if (i <= count) add(base + (words[i] & 0xffffu), words[i] >> 16);
      for (uint32_t i = kHead; i <= count; ++i) {
        const uint32_t word = tail[i];
        add(base + (word & 0xffffu), word >> 16);
      }
    } else {
      const uint4* dense = static_cast<const uint4*>(f.spill) + at * (kTile / 8);
#pragma unroll 4
      for (int chunk = 0; chunk < kTile / 8; ++chunk) {
        const uint4 v = dense[chunk];
        const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (const uint32_t bits = pairs[e / 2] >> (16 * (e & 1)) & 0xffffu) add(base + 8 * (chunk ^ (row & 7)) + e, bits);
      }
    }
  }
  sums.finish(out, tile0 * kTile);
}

}  // namespace twell::hopper
