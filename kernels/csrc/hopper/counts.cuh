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
      const int count = f.heads[(static_cast<int64_t>(row) * f.tiles + tile) * kHead] & kCount;
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

// What a CTA gathers of 2048 neurons before it adds them to everyone's. A value is at most 2^40 steps; its sum over 1024 rows is kept in
// parts: that of the lowest 11 bits, below 2^21, of the next 20, below 2^30, and of the rest, which few values have. The first shares
// its word with the number of rows that fired.
struct Sums {
  static constexpr int kLow = 11, kMiddle = 20, kFires = 21;
  static_assert(kSumRows << kLow <= 1 << kFires && kSumRows < 1 << (32 - kFires));
  struct __align__(16) Extremes {
    int value_max, token_min, token_max;
    uint32_t first_sequence;
  };
  Extremes extremes[kSumColumns];  // first, as they are looked at 16 bytes at a time
  uint32_t fires_low[kSumColumns], middle[kSumColumns], high[kSumColumns];

  __device__ __forceinline__ void add(int column, float value, int token, uint32_t sequence) {
    const unsigned long long steps = __float2ull_rn(fminf(value, 0x1p20f) * 0x1p20f);
    atomicAdd(&fires_low[column], 1u << kFires | (static_cast<uint32_t>(steps) & ((1u << kLow) - 1)));
    atomicAdd(&middle[column], static_cast<uint32_t>(steps >> kLow) & ((1u << kMiddle) - 1));
    if (const uint32_t rest = steps >> (kLow + kMiddle)) atomicAdd(&high[column], rest);
    Extremes& has = extremes[column];
    int value_max, token_min, token_max, first_sequence;  // a glance, as extremes seldom move
    asm volatile("ld.volatile.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value_max), "=r"(token_min), "=r"(token_max), "=r"(first_sequence)
                 : "r"(smem_address(&has)));
    if (__float_as_int(value) > value_max) atomicMax(&has.value_max, __float_as_int(value));  // positive floats order as their bits
    if (token < token_min) atomicMin(&has.token_min, token);
    if (token > token_max) atomicMax(&has.token_max, token);
    if (sequence < static_cast<uint32_t>(first_sequence)) atomicMin(&has.first_sequence, sequence);
  }
};

template <typename T>
__global__ void __launch_bounds__(kCountThreads) count_neurons(const Ffn f, const Counts out) {
  extern __shared__ uint4 raw[];
  Sums& sums = *reinterpret_cast<Sums*>(raw);
  const int tile0 = blockIdx.y * kSumTiles, tile = tile0 + threadIdx.x % kSumTiles;
  for (int i = threadIdx.x; i < kSumColumns; i += kCountThreads) {
    sums.fires_low[i] = sums.middle[i] = sums.high[i] = 0;
    sums.extremes[i] = {0, INT32_MAX, INT32_MIN, UINT32_MAX};
  }
  __syncthreads();
  const int end = min(f.rows, (static_cast<int>(blockIdx.x) + 1) * kSumRows);
  for (int row = blockIdx.x * kSumRows + threadIdx.x / kSumTiles; row < end; row += kCountThreads / kSumTiles) {
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
  __syncthreads();
  for (int i = threadIdx.x; i < kSumColumns; i += kCountThreads) {
    const int neuron = tile0 * kTile + i;
    const uint32_t fires = sums.fires_low[i] >> Sums::kFires, low = sums.fires_low[i] & ((1u << Sums::kFires) - 1);
    if (!fires) continue;
    const unsigned long long middle = sums.middle[i], high = sums.high[i];
    const Sums::Extremes& has = sums.extremes[i];
    atomicAdd(&out.fires[neuron], static_cast<unsigned long long>(fires));
    atomicAdd(&out.value_sum[neuron], (high << (Sums::kLow + Sums::kMiddle)) + (middle << Sums::kLow) + low);
    atomicMax(reinterpret_cast<int*>(&out.value_max[neuron]), has.value_max);
    atomicMin(&out.token_min[neuron], has.token_min);
    atomicMax(&out.token_max[neuron], has.token_max);
    atomicMin(&out.first_sequence[neuron], has.first_sequence);  // -1, never, is the greatest of them
  }
}

}  // namespace twell::hopper
