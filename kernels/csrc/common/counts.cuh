// The probes: integer sums and extremes over rows, gathered in shared memory first, so that their order does not matter.
#pragma once

#include "common/counts.h"

namespace twell {

constexpr int kCountThreads = 256;

// nnz of each row and, if asked, the histograms of how full tiles are. A warp a row, a lane a tile; how_many(row, tile) of them
// fired. shared: [2 * (tile + 1)], where the histograms gather.
template <typename HowMany>
__device__ __forceinline__ void count_tiles(const Counts& out, const uint8_t* finite, int rows, int tiles, int tile_columns,
                                            uint32_t* shared, HowMany how_many) {
  uint32_t *pairs = shared, *fullest = shared + tile_columns + 1;
  const int lane = threadIdx.x % 32, warps = kCountThreads / 32;
  for (int i = threadIdx.x; i < 2 * (tile_columns + 1); i += kCountThreads) shared[i] = 0;
  __syncthreads();
  for (int row = blockIdx.x * warps + threadIdx.x / 32; row < rows; row += gridDim.x * warps) {
    const bool whole = finite[row], counted = whole && (out.counted == nullptr || out.counted[row]);
    int sum = 0, most = 0;
    for (int tile = lane; tile < tiles; tile += 32) {
      const int count = how_many(row, tile);
      sum += count, most = max(most, count);
      if (counted && out.pairs != nullptr) atomicAdd(&pairs[count], 1);
    }
    sum = __reduce_add_sync(~0u, sum), most = __reduce_max_sync(~0u, most);
    if (lane == 0) {
      out.nnz[row] = whole ? sum : 0;
      if (counted && out.pairs != nullptr) atomicAdd(&fullest[most], 1);
    }
  }
  if (out.pairs == nullptr) return;
  __syncthreads();
  for (int i = threadIdx.x; i <= tile_columns; i += kCountThreads) {
    if (pairs[i]) atomicAdd(&out.pairs[i], static_cast<unsigned long long>(pairs[i]));
    if (fullest[i]) atomicAdd(&out.fullest[i], static_cast<unsigned long long>(fullest[i]));
  }
}

// What a CTA gathers of 2048 neurons over at most 512 rows before it adds them to everyone's. A value is at most 2^40 steps of
// 2^-20; its sum is kept in two parts of 20 bits, each below 2^20 and so 512 of them below 2^29.
struct Sums {
  static constexpr int kRows = 512, kColumns = 2048;
  uint32_t fires[kColumns], low[kColumns], high[kColumns], first_sequence[kColumns];
  int value_max[kColumns], token_min[kColumns], token_max[kColumns];

  __device__ __forceinline__ void begin() {
    for (int i = threadIdx.x; i < kColumns; i += kCountThreads) {
      fires[i] = low[i] = high[i] = 0, value_max[i] = 0;
      token_min[i] = INT32_MAX, token_max[i] = INT32_MIN, first_sequence[i] = UINT32_MAX;
    }
    __syncthreads();
  }

  // A value of the neuron `column` of the 2048.
  __device__ __forceinline__ void add(int column, float value, int token, uint32_t sequence) {
    const unsigned long long steps = __float2ull_rn(fminf(value, 0x1p20f) * 0x1p20f);
    atomicAdd(&fires[column], 1);
    atomicAdd(&low[column], static_cast<uint32_t>(steps) & 0xfffffu);
    if (steps >> 20) atomicAdd(&high[column], static_cast<uint32_t>(steps >> 20));
    // Extremes seldom move: a glance is cheaper than an atomic. Positive floats order as their bits.
    if (__float_as_int(value) > seen(value_max[column])) atomicMax(&value_max[column], __float_as_int(value));
    if (token < seen(token_min[column])) atomicMin(&token_min[column], token);
    if (token > seen(token_max[column])) atomicMax(&token_max[column], token);
    if (sequence < seen(first_sequence[column])) atomicMin(&first_sequence[column], sequence);
  }

  // Adds to those of all rows, from neuron `first` on.
  __device__ __forceinline__ void finish(const Counts& out, int first) {
    __syncthreads();
    for (int i = threadIdx.x; i < kColumns; i += kCountThreads) {
      if (!fires[i]) continue;
      const int neuron = first + i;
      atomicAdd(&out.fires[neuron], static_cast<unsigned long long>(fires[i]));
      atomicAdd(&out.value_sum[neuron], (static_cast<unsigned long long>(high[i]) << 20) + low[i]);
      atomicMax(reinterpret_cast<int*>(&out.value_max[neuron]), value_max[i]);
      atomicMin(&out.token_min[neuron], token_min[i]);
      atomicMax(&out.token_max[neuron], token_max[i]);
      atomicMin(&out.first_sequence[neuron], first_sequence[i]);  // -1, never, is the greatest of them
    }
  }

 private:
  template <typename Number>
  static __device__ __forceinline__ Number seen(Number& number) {
    return *static_cast<volatile Number*>(&number);
  }
};

}  // namespace twell
