// One CTA counts one block: the neurons of its rows become bits in shared memory, which are counted and kept for larger
// blocks.
#include "common/launch.cuh"
#include "unions/unions.h"

namespace twell::unions {

namespace {

constexpr int kThreads = 128;

// Counts the bits of words [words] in shared memory into the histogram, and keeps them.
__device__ __forceinline__ void finish(const uint32_t* found, int words, uint32_t* kept,
                                       unsigned long long* histogram) {
  __shared__ int size;
  if (threadIdx.x == 0) size = 0;
  __syncthreads();
  int mine = 0;
  for (int i = threadIdx.x; i < words; i += kThreads) kept[i] = found[i], mine += __popc(found[i]);
  mine = __reduce_add_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) atomicAdd(&size, mine);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&histogram[size], 1ull);
}

__device__ __forceinline__ bool nonzero(const void* spill, int64_t at, int bytes) {
  if (bytes == 2) return static_cast<const uint16_t*>(spill)[at] << 1 & 0xffff;  // whatever its sign
  return static_cast<const uint32_t*>(spill)[at] << 1;
}

__global__ void __launch_bounds__(kThreads)
    of_rows(const Packed p, int d_ff, const int* blocks, int wide, uint32_t* marks, unsigned long long* histogram) {
  extern __shared__ uint32_t bits[];
  const int words = p.tiles * p.tile / 32;
  for (int i = threadIdx.x; i < words; i += kThreads) bits[i] = 0;
  __syncthreads();
  blocks += static_cast<int64_t>(blockIdx.x) * wide;
  for (int pair = threadIdx.x; pair < wide * p.tiles; pair += kThreads) {
    const int row = blocks[pair / p.tiles], tile = pair % p.tiles;
    const int64_t at = static_cast<int64_t>(row) * p.tiles + tile;
    const uint32_t *head = p.heads + at * p.head_words,
                   *tail = p.tails + at * (p.slots + 1 - p.head_words) - p.head_words;
    const int count = head[0];
    uint32_t* tile_bits = bits + tile * (p.tile / 32);
    const int columns = min(p.tile, d_ff - tile * p.tile);
    const auto mark = [&](int column) {
      if (column < columns) atomicOr(&tile_bits[column / 32], 1u << column % 32);
    };
    if (count <= p.slots) {
      for (int i = 1; i <= count; ++i) mark((i < p.head_words ? head[i] : tail[i]) & 0xffffu);
    } else {
      const int64_t first = (p.spill_index != nullptr ? p.spill_index[at] : at) * p.tile;
      const int swizzle = p.spill_index != nullptr ? 0 : (row & 7) << 3;
      for (int i = 0; i < p.tile; ++i)
        if (nonzero(p.spill, first + i, p.spill_bytes)) mark(i ^ swizzle);
    }
  }
  __syncthreads();
  finish(bits, words, marks + static_cast<int64_t>(blockIdx.x) * words, histogram);
}

__global__ void __launch_bounds__(kThreads) of_blocks(const uint32_t* smaller, const int* blocks, int wide, int words,
                                                      uint32_t* marks, unsigned long long* histogram) {
  extern __shared__ uint32_t bits[];
  blocks += static_cast<int64_t>(blockIdx.x) * wide;
  for (int i = threadIdx.x; i < words; i += kThreads) {
    uint32_t all = 0;
    for (int member = 0; member < wide; ++member) all |= smaller[static_cast<int64_t>(blocks[member]) * words + i];
    bits[i] = all;
  }
  __syncthreads();
  finish(bits, words, marks + static_cast<int64_t>(blockIdx.x) * words, histogram);
}

}  // namespace

void launch_rows(const Packed& packed, int d_ff, const int* blocks, int n, int wide, uint32_t* marks,
                 unsigned long long* histogram, void* stream) {
  const int bytes = packed.tiles * packed.tile / 8;
  if (n > 0)
    launch(of_rows, n, kThreads, bytes, static_cast<cudaStream_t>(stream), packed, d_ff, blocks, wide, marks,
           histogram);
}

void launch_blocks(const uint32_t* smaller, const int* blocks, int n, int wide, int words, uint32_t* marks,
                   unsigned long long* histogram, void* stream) {
  if (n > 0)
    launch(of_blocks, n, kThreads, words * 4, static_cast<cudaStream_t>(stream), smaller, blocks, wide, words, marks,
           histogram);
}

}  // namespace twell::unions
