// The probes, read from the words: what fired, a row and a neuron. Integer sums and extremes, so that order does not matter.
#pragma once

#include "hopper/plan.cuh"

namespace twell::hopper {

constexpr int kCountThreads = 512;
constexpr int kSumTiles = 8, kSumRows = 1024;  // tiles and rows to a CTA of the neurons' sums
constexpr int kSumColumns = kSumTiles * kTile;

// nnz of each row and, if asked, the histograms of how full tiles are. A warp a row, a lane a tile.
static __global__ void __launch_bounds__(kCountThreads) count_rows(const Ffn f, const Counts out) {
  __shared__ uint32_t pairs[kTile + 1], fullest[kTile + 1];
  const int lane = threadIdx.x % 32, warps = kCountThreads / 32;
  for (int i = threadIdx.x; i <= kTile; i += kCountThreads) pairs[i] = fullest[i] = 0;
  __syncthreads();
  for (int row = blockIdx.x * warps + threadIdx.x / 32; row < f.rows; row += gridDim.x * warps) {
    const bool finite = f.finite[row], counted = finite && (out.counted == nullptr || out.counted[row]);
    int sum = 0, most = 0;
    for (int tile = lane; tile < f.tiles; tile += 32) {
      const int count = f.heads[(static_cast<int64_t>(row) * f.tiles + tile) * kHead];
      sum += count, most = max(most, count);
      if (counted && out.pairs != nullptr) atomicAdd(&pairs[count], 1);
    }
    sum = __reduce_add_sync(~0u, sum), most = __reduce_max_sync(~0u, most);
    if (lane == 0) {
      out.nnz[row] = finite ? sum : 0;
      if (counted && out.pairs != nullptr) atomicAdd(&fullest[most], 1);
    }
  }
  if (out.pairs == nullptr) return;
  __syncthreads();
  for (int i = threadIdx.x; i <= kTile; i += kCountThreads) {
    if (pairs[i]) atomicAdd(&out.pairs[i], static_cast<unsigned long long>(pairs[i]));
    if (fullest[i]) atomicAdd(&out.fullest[i], static_cast<unsigned long long>(fullest[i]));
  }
}

// What a CTA gathers of 2048 neurons before it adds them to everyone's. A value is at most 2^40 steps; its sum is kept in two
// parts of 20 bits, each below 2^20 and so 1024 of them below 2^30.
struct Sums {
  uint32_t fires[kSumColumns], low[kSumColumns], high[kSumColumns], first_sequence[kSumColumns];
  int value_max[kSumColumns], token_min[kSumColumns], token_max[kSumColumns];
};

template <typename T>
__global__ void __launch_bounds__(kCountThreads) count_neurons(const Ffn f, const Counts out) {
  extern __shared__ uint32_t raw[];
  Sums& sums = *reinterpret_cast<Sums*>(raw);
  const int tile0 = blockIdx.y * kSumTiles, tile = tile0 + threadIdx.x % kSumTiles;
  for (int i = threadIdx.x; i < kSumColumns; i += kCountThreads) {
    sums.fires[i] = sums.low[i] = sums.high[i] = 0, sums.value_max[i] = 0;
    sums.token_min[i] = INT32_MAX, sums.token_max[i] = INT32_MIN, sums.first_sequence[i] = UINT32_MAX;
  }
  __syncthreads();
  const int end = min(f.rows, (static_cast<int>(blockIdx.x) + 1) * kSumRows);
  for (int row = blockIdx.x * kSumRows + threadIdx.x / kSumTiles; row < end; row += kCountThreads / kSumTiles) {
    if (tile >= f.tiles || !f.finite[row] || (out.counted != nullptr && !out.counted[row])) continue;
    const int64_t at = static_cast<int64_t>(row) * f.tiles + tile;
    const uint32_t *head = f.heads + at * kHead, *tail = f.tails + at * kTail - kHead;
    const int count = head[0];
    if (count == 0) continue;
    const int token = out.tokens[row];
    const uint32_t sequence = out.sequences[row];
    const auto add = [&](int column, uint32_t bits) {  // column in this CTA's 2048
      const float value = half_of<T>(bits, 0);
      const unsigned long long steps = __float2ull_rn(fminf(value, 0x1p20f) * 0x1p20f);
      atomicAdd(&sums.fires[column], 1);
      atomicAdd(&sums.low[column], static_cast<uint32_t>(steps) & 0xfffffu);
      if (steps >> 20) atomicAdd(&sums.high[column], static_cast<uint32_t>(steps >> 20));
      if (__float_as_int(value) > *static_cast<volatile int*>(&sums.value_max[column]))
        atomicMax(&sums.value_max[column], __float_as_int(value));  // positive floats order as their bits
      if (token < *static_cast<volatile int*>(&sums.token_min[column])) atomicMin(&sums.token_min[column], token);
      if (token > *static_cast<volatile int*>(&sums.token_max[column])) atomicMax(&sums.token_max[column], token);
      if (sequence < *static_cast<volatile uint32_t*>(&sums.first_sequence[column]))
        atomicMin(&sums.first_sequence[column], sequence);
    };
    const int base = threadIdx.x % kSumTiles * kTile;
    if (count <= kSlots) {
      for (int i = 1; i <= count; ++i) {
        const uint32_t word = i < kHead ? head[i] : tail[i];
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
  __syncthreads();
  for (int i = threadIdx.x; i < kSumColumns; i += kCountThreads) {
    const int neuron = tile0 * kTile + i;
    if (!sums.fires[i]) continue;
    atomicAdd(&out.fires[neuron], static_cast<unsigned long long>(sums.fires[i]));
    atomicAdd(&out.value_sum[neuron], (static_cast<unsigned long long>(sums.high[i]) << 20) + sums.low[i]);
    atomicMax(reinterpret_cast<int*>(&out.value_max[neuron]), sums.value_max[i]);
    atomicMin(&out.token_min[neuron], sums.token_min[i]);
    atomicMax(&out.token_max[neuron], sums.token_max[i]);
    atomicMin(&out.first_sequence[neuron], sums.first_sequence[i]);  // -1, never, is the greatest of them
  }
}

}  // namespace twell::hopper
