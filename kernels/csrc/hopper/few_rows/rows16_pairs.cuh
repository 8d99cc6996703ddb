// The up product of a group of neurons of which little fires: single pairs of a neuron and a row that fires it. All
// that they need is requested at once and goes to registers, so it takes one trip to memory where a product of boxes
// takes a copy into the ring, a product of 16 neurons and a wait for each 64 of k.
#pragma once

#include "common/convert.cuh"
#include "hopper/few_rows/rows16.cuh"

namespace twell::hopper {

constexpr int kRows16Pairs = 8;  // up to so many pairs of a group; with more, the product is faster

struct alignas(4) Rows16Pair {  // read as a word
  uint8_t neuron, place, row;   // of the group; in the list of those that fire; of the call
};

// The pairs of a group, in any order: each is summed by itself. Those past kRows16Pairs are counted alone.
struct Rows16Pairs {
  int count;
  Rows16Pair pairs[kRows16Pairs];

  // Adds the pairs of a neuron. rows: a bit each; by a thread
  __device__ __forceinline__ void add(int neuron, int place, uint32_t rows) {
    for (int at = atomicAdd(&count, __popc(rows)); rows != 0 && at < kRows16Pairs; ++at, rows &= rows - 1)
      pairs[at] = {static_cast<uint8_t>(neuron), static_cast<uint8_t>(place), static_cast<uint8_t>(__ffs(rows) - 1)};
  }
};

// Writes, for each pair, the sum over this warp's share of k to sums[place][row]. first: the group's first neuron
template <typename T, int kPitch>
__device__ __forceinline__ void sum_pairs(const Ffn& f, const Rows16Pairs& group, int first, float (*sums)[kPitch],
                                          int warp, int lane) {
  constexpr int kAtOnce = 4;
  const int each = ((f.d_model + 63) / 64 + kRows16Warps - 1) / kRows16Warps * 64, from = warp * each,
            to = min(from + each, f.d_model);
  const int count = group.count;
  const T *x = static_cast<const T*>(f.x), *w = static_cast<const T*>(f.w_up);
#pragma unroll 1
  for (int at = 0; at == 0 || at < count; at += kAtOnce) {  // a rehearsal has no pairs
    float sum[kAtOnce] = {};
#pragma unroll 1
    for (int k = from + 8 * lane; k < to; k += 256) {
      uint4 weights[kAtOnce], values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool there = at + i < count;
        const Rows16Pair pair = group.pairs[there ? at + i : at];
        weights[i] = sm80::load_16(w + static_cast<int64_t>(first + pair.neuron) * f.d_model + k, there);
        values[i] = sm80::load_16(x + static_cast<int64_t>(pair.row) * f.d_model + k, there);
      }
      __syncwarp(__activemask());  // else the compiler waits for the first of them before it requests the last
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t *a = &weights[i].x, *b = &values[i].x;
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) sum[i] = fmaf(half_of<T>(a[j], e), half_of<T>(b[j], e), sum[i]);
      }
    }
    float mine = 0.f;  // of the lane-th pair
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], step);
      mine = lane == i ? sum[i] : mine;
    }
    if (lane < kAtOnce && at + lane < count) {
      const Rows16Pair pair = group.pairs[at + lane];
      sums[pair.place][pair.row] = mine;
    }
  }
}

}  // namespace twell::hopper
