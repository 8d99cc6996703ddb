// What the lists of a compact pass are besides those of any other: where panels and chunks begin, and whether they fit.
#pragma once

#include "common/bits.cuh"
#include "hopper/backward/compact/params.h"
#include "hopper/backward/token_lists.cuh"

namespace twell::hopper {

__device__ __forceinline__ bool needs_no_lists(const CompactBackward& b) { return *b.kept.used > b.kept.capacity; }

// Counts the panels before each block. By the first 32 threads of a CTA.
__device__ __forceinline__ void prepare(const CompactBackward& b) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  int sum = 0;
  for (int block0 = 0; block0 < b.blocks; block0 += 32) {
    const int block = block0 + lane;
    const int mine = block < b.blocks ? (abs(b.kept.union_sizes[block]) + kPanelColumns - 1) / kPanelColumns : 0;
    int upto = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += other;
    }
    if (block < b.blocks) b.panel_starts[block] = sum + upto - mine;
    sum += __shfl_sync(~0u, upto, 31);
  }
  if (lane == 0) b.panel_starts[b.blocks] = sum;
}

// Counts the chunks before each group, [panels + 1]. By a warp.
__device__ __forceinline__ void count_chunks(const CompactBackward& b, int* starts) {
  const int lane = threadIdx.x % 32;
  int sum = 0;
  for (int group0 = 0; group0 < b.panels; group0 += 32) {
    const int group = group0 + lane, mine = group < b.panels ? chunks_of(b.token_counts[group]) : 0;
    const int upto = sum_upto(mine, lane);
    if (group < b.panels) starts[group] = sum + upto - mine;
    sum += __shfl_sync(~0u, upto, 31);
  }
  if (lane == 0) starts[b.panels] = sum;
}

// Shared memory: marks and counts of a block, [panels][4] each; then starts, [panels + 1].
static __global__ void __launch_bounds__(kListThreads) place_compact_values(const CompactBackward b) {
  extern __shared__ uint32_t marks[];
  int *before = reinterpret_cast<int*>(marks + b.panels * 4), *starts = before + b.panels * 4;
  const int thread = threadIdx.x, block = blockIdx.x;
  let_next_launch();
  wait_for_launches();
  if (needs_no_lists(b)) {
    if (block == 0 && thread == 0) *b.fits = 0;
    return;
  }
  if (thread < 32) count_chunks(b, starts);
  if (block < b.blocks)
    for (int i = thread; i < b.panels * 4; i += kListThreads) {
      const int64_t at = static_cast<int64_t>(i / 4) * words_of(b) + block * 4 + i % 4;
      marks[i] = b.marks[at], before[i] = b.before[at];
    }
  __syncthreads();
  // sums of the weights' gradients lie where the panels were
  const int64_t panels = static_cast<int64_t>(b.panel_starts[b.blocks]) * 2 * kPanelBytes,
                sums = 3ll * kMostCtas * kPartBytesOfTile;
  const int64_t chunks = static_cast<int64_t>(starts[b.panels]) * kChunkValues * 2;
  const bool fits = b.panel_bytes > 0 ? max(panels, sums) <= b.panel_bytes && chunks <= b.arena_bytes
                                      : max(panels, sums) + chunks <= b.arena_bytes;
  const uint32_t first = static_cast<uint32_t>((b.arena_bytes - chunks) / 2);
  if (block == 0) {
    if (thread == 0) *b.fits = fits;
    for (int group = thread; group < b.panels; group += kListThreads)
      b.chunk_starts[group] = first + starts[group] * kChunkValues;
  }
  if (!fits) return;
  uint16_t* arena = static_cast<uint16_t*>(b.chunks);
  if (const int slice = block - b.blocks; slice >= 0) {
    const int slices = gridDim.x - b.blocks;
    uint4* to = reinterpret_cast<uint4*>(arena + first);
    for (int64_t i = static_cast<int64_t>(slice) * kListThreads + thread; i < chunks / 16;
         i += static_cast<int64_t>(slices) * kListThreads)
      to[i] = make_uint4(0, 0, 0, 0);
    return;
  }
  const uint16_t* ranks = b.union_ranks + static_cast<int64_t>(block) * b.panels * kPanelColumns;
  each_value(b, block, [&](int value, int rank, int row) {
    const int of_neuron = ranks[rank], group = of_neuron / kListNeurons, neuron = of_neuron % kListNeurons,
              word = group * 4 + row / 32;
    const int token = before[word] + __popc(marks[word] & ((1u << (row % 32)) - 1)), column = token % kChunk;
    b.places[value] = first + (starts[group] + token / kChunk) * kChunkValues + neuron * kChunk +
                      (((column >> 3) ^ (neuron & 7)) << 3) + (column & 7);
  });
}

}  // namespace twell::hopper
