// The probes: integer sums and extremes over rows, gathered in shared memory first, so that their order does not
// matter.
#pragma once

#include "common/probes.h"
#include "common/smem.cuh"

namespace twell {

// nnz of each row and, if asked, the histograms of how full tiles are. A warp a row, a lane a tile; how_many(row, tile)
// of them fired. shared: [2 * (tile + 1)], where the histograms gather.
template <typename HowMany>
__device__ __forceinline__ void count_tiles(const Counts& out, const uint8_t* finite, int rows, int tiles,
                                            int tile_columns, uint32_t* shared, HowMany how_many) {
  uint32_t *pairs = shared, *fullest = shared + tile_columns + 1;
  const int lane = threadIdx.x % 32, warps = static_cast<int>(blockDim.x) / 32;
  for (int i = threadIdx.x; i < 2 * (tile_columns + 1); i += blockDim.x) shared[i] = 0;
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
  for (int i = threadIdx.x; i <= tile_columns; i += blockDim.x) {
    if (pairs[i]) atomicAdd(&out.pairs[i], static_cast<unsigned long long>(pairs[i]));
    if (fullest[i]) atomicAdd(&out.fullest[i], static_cast<unsigned long long>(fullest[i]));
  }
}

// What a CTA gathers of kColumns neurons over at most kRows rows before it adds them to everyone's. A value is at most
// 2^40 steps of 2^-20; its sum is kept in parts: that of the lowest 10 bits, below 2^21, of the next 20, below 2^31,
// and of the rest, which few values have. The first shares its word with the number of rows that fired.
template <int kColumns>
struct Sums {
  static_assert(kNeuronSums == 6,
                "each sum of TWELL_NEURON_SUMS has a member here, and a line in begin, add and finish");
  static constexpr int kRows = 2016;
  static constexpr int kLow = 10, kMiddle = 20, kFires = 21;
  static_assert(kRows << kLow <= 1 << kFires && kRows < 1 << (32 - kFires));
  struct __align__(16) Extremes {
    int value_max, token_min, token_max;
    uint32_t first_sequence;
  };
  Extremes extremes[kColumns];  // first, as they are looked at 16 bytes at a time
  uint32_t fires_low[kColumns], middle[kColumns], high[kColumns];

  __device__ __forceinline__ void begin() {
    for (int i = threadIdx.x; i < kColumns; i += blockDim.x) {
      fires_low[i] = middle[i] = high[i] = 0;
      extremes[i] = {0, INT32_MAX, INT32_MIN, UINT32_MAX};
    }
    __syncthreads();
  }

  // A value of the neuron `column` of these.
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
    const int bits = __float_as_int(value);  // positive: ordered as its bits
    if (bits > value_max) atomicMax(&has.value_max, bits);
    if (token < token_min) atomicMin(&has.token_min, token);
    if (token > token_max) atomicMax(&has.token_max, token);
    if (sequence < static_cast<uint32_t>(first_sequence)) atomicMin(&has.first_sequence, sequence);
  }

  // Adds to those of all rows, from neuron `first` on.
  __device__ __forceinline__ void finish(const Counts& out, int first) const {
    __syncthreads();
    for (int at = threadIdx.x; at < kColumns; at += blockDim.x) {
      const int i = (at + 64 * blockIdx.x) % kColumns;  // not all CTAs at the same neurons at once
      const int neuron = first + i;
      const uint32_t fires = fires_low[i] >> kFires, low = fires_low[i] & ((1u << kFires) - 1);
      if (!fires) continue;
      atomicAdd(&out.fires[neuron], static_cast<unsigned long long>(fires));
      const unsigned long long parts[] = {low, middle[i], high[i]};
      atomicAdd(&out.value_sum[neuron], parts[0] + (parts[1] << kLow) + (parts[2] << (kLow + kMiddle)));
      const Extremes& has = extremes[i];
      atomicMax(reinterpret_cast<int*>(&out.value_max[neuron]), has.value_max);
      atomicMin(&out.token_min[neuron], has.token_min);
      atomicMax(&out.token_max[neuron], has.token_max);
      atomicMin(&out.first_sequence[neuron], has.first_sequence);  // -1, never, is the greatest of them
    }
  }
};

}  // namespace twell
