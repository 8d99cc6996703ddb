// The plan: for each block of rows, the union of the neurons that fire in them, and the rows' values over it.
//
// If blocks are few, several CTAs take one block; each computes the whole union, a bit a neuron, and lays out some of
// the rows. A union of all neurons needs no special case: its list is every neuron, and the products over it are the
// dense ones.
#pragma once

#include "common/bits.cuh"
#include "cuda/product.cuh"

namespace twell::cuda {

constexpr int kPlanThreads = 256, kPlanWarps = kPlanThreads / 32;

inline int plan_shared_bytes(int words) { return words * 2 * 4 + kPlanWarps * 32 * 32 * 2; }

// A warp lays out 32 words of a row of `hidden`, a lane a word, through 1024 values of shared memory. The value is 0
// where a neuron of the union did not fire, and where there is no finite row.
__device__ __forceinline__ void lay_out(const Ffn& f, const uint32_t* bits, const int* before, int size,
                                        uint16_t* staged, uint16_t* to, int row, bool there, int w0, int lane) {
  const int w = w0 + lane, first = before[w0];
  const bool last = w0 + 32 >= f.words;
  const int many = (last ? size : before[w0 + 32]) - first;
  const uint32_t fired = there && w < f.words ? f.masks[static_cast<int64_t>(row) * f.words + w] : 0;
  for (int i = lane; 2 * i < many; i += 32) reinterpret_cast<uint32_t*>(staged)[i] = 0;
  __syncwarp();
  if (fired != 0) {
    const uint4* values = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(f.values) +
                                                         static_cast<int64_t>(row) * f.pitch + 32 * w);
    const uint32_t among = bits[w];
    uint16_t* place = staged + before[w] - first;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t eight = fired >> (8 * c) & 0xffu;
      if (eight == 0) continue;
      const uint4 v = values[c];
      const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (eight >> e & 1) {
          const int rank = __popc(among & ((1u << (8 * c + e)) - 1));
          place[rank] = static_cast<uint16_t>(pair[e / 2] >> (16 * (e & 1)));
        }
    }
  }
  __syncwarp();
  for (int i = lane; i < many; i += 32) to[first + i] = staged[i];
  __syncwarp();
  if (last && lane < (-size & 7)) to[size + lane] = 0;  // the products read eight columns at a time
}

template <int kBlock>
__global__ void __launch_bounds__(kPlanThreads) plan(const Ffn f, int tile_columns) {
  extern __shared__ uint32_t bits[];  // [words] of the union, a bit a neuron; before [words]; staged [warps][1024]
  int* before = reinterpret_cast<int*>(bits + f.words);
  __shared__ bool finite[kBlock];
  __shared__ int size;
  const int block = blockIdx.x, m0 = block * kBlock, rows = min(kBlock, f.rows - m0);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  if (thread < kBlock) finite[thread] = thread < rows && f.finite[m0 + thread];
  __syncthreads();
  for (int w = thread; w < f.words; w += kPlanThreads) {
    const uint32_t* mask = f.masks + static_cast<int64_t>(m0) * f.words + w;
    uint32_t any = 0;
#pragma unroll 16
    for (int r = 0; r < kBlock; ++r)
      if (finite[r]) any |= mask[static_cast<int64_t>(r) * f.words];
    bits[w] = any;
  }
  __syncthreads();
  if (warp == 0) {
    const int sum = count_before(bits, before, f.words, lane);
    if (lane == 0) size = sum;
  }
  __syncthreads();

  if (blockIdx.y == 0) {
    int* list = f.lists + static_cast<int64_t>(block) * f.d_ff;
    for (int w = thread; w < f.words; w += kPlanThreads) {
      int at = before[w];
      for (uint32_t left = bits[w]; left; left &= left - 1) list[at++] = 32 * w + __ffs(left) - 1;
    }
    if (thread == 0) {
      const int tiles = (size + tile_columns - 1) / tile_columns;
      f.sizes[block] = size;
      if (f.w_up != nullptr && tiles > 0) {
        int2* task = reinterpret_cast<int2*>(f.tasks) + 1 + atomicAdd(f.tasks, tiles);
        for (int tile = 0; tile < tiles; ++tile) *task++ = make_int2(block, tile);
      }
    }
  }

  uint16_t* staged = reinterpret_cast<uint16_t*>(before + f.words) + warp * 1024;
  const int groups = (f.words + 31) / 32;
  for (int i = blockIdx.y * kPlanWarps + warp; i < kBlock * groups; i += gridDim.y * kPlanWarps) {
    const int r = i / groups;
    uint16_t* to = static_cast<uint16_t*>(f.hidden) + static_cast<int64_t>(m0 + r) * f.d_ff;
    lay_out(f, bits, before, size, staged, to, m0 + r, finite[r], i % groups * 32, lane);
  }
}

}  // namespace twell::cuda
