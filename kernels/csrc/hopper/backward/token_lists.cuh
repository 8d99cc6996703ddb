// From rows to neurons: the tokens of each group of 64 neurons, and the position of each kept value among its group's.
//
// 1. rank_neurons: neurons in order of how often they fire, most first; those that fire equally often in order of
//    number.
// 2. mark_tokens, a CTA for each block: a bit for each group and position. No values are sorted: the k-th token of a
//    group follows from counting bits, so that lists are the same in every run.
// 3. list_tokens, a CTA for each group: the tokens as a list of rows, and how many precede each word of bits.
// 4. place_values: where each kept value goes; and zeros where they go.
#pragma once

#include "common/bits.cuh"
#include "hopper/backward/params.h"
#include "hopper/gemm.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

constexpr int kListThreads = 512, kListWarps = kListThreads / 32;
constexpr int kRankThreads = 256, kRankShare = 8;  // threads that count for one neuron
constexpr int kZeroSlices = 16;                    // CTAs that fill a group's chunks with zeros

__device__ __forceinline__ int words_of(const Backward& b) { return b.blocks * (kBlockRows / 32); }
__device__ __forceinline__ int chunks_of(int tokens) { return (tokens + kChunk - 1) / kChunk; }
__device__ __forceinline__ int64_t chunk_at(const Backward& b, int group, int chunk) {  // in values
  return (static_cast<int64_t>(group) * b.blocks * (kBlockRows / kChunk) + chunk) * kChunkValues;
}

// What `compact/` has otherwise: whether the lists of a pass are not needed, and what precedes them.
__device__ __forceinline__ bool needs_no_lists(const Backward&) { return false; }
__device__ __forceinline__ void prepare(const Backward&) {}

template <typename Pass>
__global__ void __launch_bounds__(kRankThreads) rank_neurons(const Pass b) {
  extern __shared__ int fires[];
  let_next_launch();
  wait_for_launches();
  for (int i = threadIdx.x; i < b.d_ff; i += kRankThreads) fires[i] = b.kept.fires[i];
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < 2 * kMostCtas; i += kRankThreads) b.arrived[i] = 0;
    if (threadIdx.x == 0) *b.task_count = 0;
    prepare(b);
  }
  if (needs_no_lists(b)) return;
  __syncthreads();
  const int neuron = blockIdx.x * (kRankThreads / kRankShare) + threadIdx.x / kRankShare,
            share = threadIdx.x % kRankShare;
  const int mine = neuron < b.d_ff ? fires[neuron] : 0;
  int rank = 0;
  for (int other = share; other < b.d_ff; other += kRankShare)
    rank += fires[other] > mine || (fires[other] == mine && other < neuron);
#pragma unroll
  for (int step = 1; step < kRankShare; step *= 2) rank += __shfl_xor_sync(~0u, rank, step);
  if (share == 0 && neuron < b.d_ff) b.rank_of[neuron] = rank, b.neuron_at[rank] = neuron;
}

// Calls one(value, rank in the union, row of the block) for the block's kept values, a warp a panel.
template <typename One>
__device__ __forceinline__ void each_value(const Backward& b, int block, One one) {
  const int* starts = b.kept.starts + static_cast<int64_t>(block) * (b.panels + 1);
  const int panels = (abs(b.kept.union_sizes[block]) + kPanelColumns - 1) / kPanelColumns;
  for (int panel = threadIdx.x / 32; panel < panels; panel += kListWarps) {
    const int end = starts[panel + 1];
#pragma unroll 4
    for (int value = starts[panel] + threadIdx.x % 32; value < end; value += 32) {
      const int position = b.kept.positions[value];
      one(value, panel * kPanelColumns + position % 64, position >> 6 & 127);
    }
  }
}

template <typename Pass>
__global__ void __launch_bounds__(kListThreads) mark_tokens(const Pass b, int processors) {
  extern __shared__ uint32_t marks[];  // [panels][4]; then the ranks of the union's neurons, [panels * 64]
  uint16_t* ranks = reinterpret_cast<uint16_t*>(marks + b.panels * 4);
  const int block = blockIdx.x, thread = threadIdx.x;
  let_next_launch();
  wait_for_launches();
  if (needs_no_lists(b)) return;
  const int size = abs(b.kept.union_sizes[block]), panels = (size + kPanelColumns - 1) / kPanelColumns;
  const int64_t list = static_cast<int64_t>(block) * b.panels * kPanelColumns;
  for (int i = thread; i < b.panels * 4; i += kListThreads) marks[i] = 0;
  for (int i = thread; i < size; i += kListThreads)
    ranks[i] = b.union_ranks[list + i] = b.rank_of[b.kept.unions[list + i]];
  const bool mine = thread >= kBlockRows || b.kept.order[block * kBlockRows + thread] == block * kBlockRows + thread;
  const bool consecutive = __syncthreads_and(mine);
  each_value(b, block, [&](int, int rank, int row) {
    atomicOr(&marks[ranks[rank] / kListNeurons * 4 + row / 32], 1u << (row % 32));
  });
  __syncthreads();
  for (int i = thread; i < b.panels * 4; i += kListThreads)
    b.marks[static_cast<int64_t>(i / 4) * words_of(b) + block * 4 + i % 4] = marks[i];
  if (thread == 0 && panels > 0) {  // tasks of dh: fewer panels in each if there would be too few for the processors
    int each = 4;
    while (each > 1 && b.blocks * ((panels + each - 1) / each) < processors) each /= 2;
    int2* task = reinterpret_cast<int2*>(b.tasks) + atomicAdd(b.task_count, (panels + each - 1) / each);
    for (int panel = 0; panel < panels; panel += each)
      *task++ = make_int2(block, 32 * panel + 16 * (size == b.d_ff) + 8 * consecutive + min(each, panels - panel));
  }
}

template <typename Pass>
__global__ void __launch_bounds__(kListThreads) list_tokens(const Pass b) {
  __shared__ int sums[kListWarps];
  const int group = blockIdx.x, thread = threadIdx.x, warp = thread / 32, lane = thread % 32, words = words_of(b);
  let_next_launch();
  wait_for_launches();
  if (needs_no_lists(b)) return;
  int* list = b.tokens + static_cast<int64_t>(group) * b.blocks * kBlockRows;
  int total = 0;
  for (int word0 = 0; word0 < words; word0 += kListThreads) {
    const int word = word0 + thread;
    const int64_t at = static_cast<int64_t>(group) * words + word;
    const uint32_t marks = word < words ? b.marks[at] : 0;
    const int mine = __popc(marks);
    const int upto = sum_upto(mine, lane);
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    int place = total + upto - mine;
    for (int i = 0; i < kListWarps; ++i) place += i < warp ? sums[i] : 0, total += sums[i];
    if (word < words) b.before[at] = place;
#pragma unroll 8
    for (int i = 0; i < 32; ++i) {  // one word of this warp after the other, a lane for each position
      const uint32_t bits = __shfl_sync(~0u, marks, i);
      const int begin = __shfl_sync(~0u, place, i);
      if (bits >> lane & 1)
        list[begin + __popc(bits & ((1u << lane) - 1))] = b.kept.order[(word - lane + i) * 32 + lane];
    }
    __syncthreads();
  }
  for (int i = total + thread; i < chunks_of(total) * kChunk; i += kListThreads) list[i] = -1;
  if (thread == 0) b.token_counts[group] = total;
}

static __global__ void __launch_bounds__(kListThreads) place_values(const Backward b) {
  extern __shared__ uint32_t marks[];  // [panels][4]
  int* before = reinterpret_cast<int*>(marks + b.panels * 4);
  const int thread = threadIdx.x;
  let_next_launch();
  wait_for_launches();
  if (const int slice = static_cast<int>(blockIdx.x) - b.blocks; slice >= 0) {
    const int group = slice / kZeroSlices, chunks = chunks_of(b.token_counts[group]);
    constexpr int kUnits = kChunkValues * 2 / 16;
    uint4* to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(b.chunks) + chunk_at(b, group, 0));
    for (int64_t i = slice % kZeroSlices * kListThreads + thread; i < static_cast<int64_t>(chunks) * kUnits;
         i += kZeroSlices * kListThreads)
      to[i] = make_uint4(0, 0, 0, 0);
    return;
  }
  const int block = blockIdx.x;
  for (int i = thread; i < b.panels * 4; i += kListThreads) {
    const int64_t at = static_cast<int64_t>(i / 4) * words_of(b) + block * 4 + i % 4;
    marks[i] = b.marks[at], before[i] = b.before[at];
  }
  __syncthreads();
  const uint16_t* ranks = b.union_ranks + static_cast<int64_t>(block) * b.panels * kPanelColumns;
  each_value(b, block, [&](int value, int rank, int row) {
    const int of_neuron = ranks[rank], group = of_neuron / kListNeurons, neuron = of_neuron % kListNeurons,
              word = group * 4 + row / 32;
    const int token = before[word] + __popc(marks[word] & ((1u << (row % 32)) - 1)), column = token % kChunk;
    b.places[value] = static_cast<uint32_t>(chunk_at(b, group, token / kChunk) + neuron * kChunk +
                                            (((column >> 3) ^ (neuron & 7)) << 3) + (column & 7));
  });
}

// Launches what lists the tokens of each group of neurons, before values are placed.
template <typename Pass>
void launch_lists_of(const Pass& b, cudaStream_t stream) {
  const int per_cta = kRankThreads / kRankShare;
  launch_overlapping(rank_neurons<Pass>, (b.d_ff + per_cta - 1) / per_cta, kRankThreads, b.d_ff * 4, 1, stream, b);
  launch_overlapping(mark_tokens<Pass>, b.blocks, kListThreads, b.panels * (16 + kPanelColumns * 2), 1, stream, b,
                     multiprocessors());
  launch_overlapping(list_tokens<Pass>, b.panels, kListThreads, 0, 1, stream, b);
}

}  // namespace twell::hopper
