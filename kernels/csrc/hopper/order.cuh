// The order in which blocks take rows: by nnz, most first, within each window of 1024, so that the few rows that fire many neurons
// share blocks and leave the unions of the others small. Rows of equal nnz keep their order: the same input has the same blocks.
//
// Windows whose rows all fire about as many neurons stay as they are: blocks of consecutive rows are read whole.
#pragma once

#include "hopper/ffn.h"

namespace twell::hopper {

// A thread a row. Bitonic: thread t ends with the key of rank t. Partners in one warp meet by shuffles, others in shared memory.
__device__ __forceinline__ uint32_t sort_window(uint32_t key, uint32_t (&keys)[kWindow]) {
  const int t = threadIdx.x;
  for (int size = 2; size <= kWindow; size *= 2)
    for (int apart = size / 2; apart > 0; apart /= 2) {
      uint32_t other;
      if (apart < 32) {
        other = __shfl_xor_sync(~0u, key, apart);
      } else {
        __syncthreads();
        keys[t] = key;
        __syncthreads();
        other = keys[t ^ apart];
      }
      const bool ascending = (t & size) == 0, lower = (t & apart) == 0;
      key = ascending == lower ? min(key, other) : max(key, other);
    }
  return key;
}

static __global__ void __launch_bounds__(kWindow) order(const Ffn f) {
  constexpr int kRowBits = 10;
  static_assert(kWindow == 1 << kRowBits);
  __shared__ uint32_t keys[kWindow];
  __shared__ unsigned long long sums[kWindow / 32], squares[kWindow / 32];  // of a warp's nnz
  const int t = threadIdx.x, warp = t / 32, lane = t % 32, m0 = blockIdx.x * kWindow, rows = min(kWindow, f.rows - m0);

  constexpr int kAhead = 16;  // rows of which a warp loads the counts at once, a lane a tile
  for (int row0 = warp * 32; row0 < warp * 32 + 32; row0 += kAhead) {
    int nnz[kAhead] = {};
    for (int tile = lane; tile < f.tiles; tile += 32)
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (row0 + i < rows) nnz[i] += f.heads[(static_cast<int64_t>(m0 + row0 + i) * f.tiles + tile) * kHead] & kCount;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      nnz[i] = __reduce_add_sync(~0u, nnz[i]);
      if (lane == 0) keys[row0 + i] = nnz[i];
    }
  }
  __syncthreads();
  const uint32_t nnz = t < rows && f.finite[m0 + t] ? keys[t] : 0;
  unsigned long long sum = nnz, square = sum * sum;
  const auto add_up = [&] {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      sum += __shfl_xor_sync(~0u, sum, step), square += __shfl_xor_sync(~0u, square, step);
  };
  add_up();
  if (lane == 0) sums[warp] = sum, squares[warp] = square;
  __syncthreads();
  sum = sums[lane], square = squares[lane];
  add_up();
  // Their deviation, at most a quarter of the mean or a 256th of d_ff: what sorting gains is then less than what scattered rows cost.
  const unsigned long long spread = rows * square - sum * sum, least = static_cast<unsigned long long>(rows) * f.d_ff;
  if (16 * spread <= sum * sum || spread <= least * least >> 16) {
    f.order[m0 + t] = m0 + t;
    return;
  }
  const uint32_t last = (1u << (32 - kRowBits)) - 1;  // where there is no row
  f.order[m0 + t] = m0 + (sort_window((t < rows ? last - 1 - nnz : last) << kRowBits | t, keys) & (kWindow - 1));
}

}  // namespace twell::hopper
