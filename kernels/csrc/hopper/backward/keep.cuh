// What the forward pass keeps: each non-zero's place in its block, gate value and hidden value, six bytes in buckets by panel.
//
// A cluster of four CTAs a block, each with one row in four: rows are in order of nnz. A CTA goes through what its rows fire, a bit a neuron,
// to count how many values each panel of the union has, and lists them in shared memory; the CTAs put their counts together; then each
// thread writes some of its CTA's list. What the list has no room for is gone through once more. Within a bucket values stand in any
// order: nothing is summed in that order. The sums of |h| have one order of their own.
#pragma once

#include "common/bits.cuh"
#include "common/convert.cuh"
#include "hopper/backward/params.h"
#include "hopper/gemm.cuh"

namespace twell::hopper {

constexpr int kKeepThreads = 512, kKeepWarps = kKeepThreads / 32;

constexpr int kListed = 4096;  // values of a CTA

// A value in the list: its neuron and row, slot in its tile, and place in its panel's bucket.
struct ListedValue {
  uint16_t neuron, place;
  uint8_t row, slot;
};

// Dynamic shared memory: bits and counts before them of the union, counts of each panel and where its values
// go, firings of each neuron; and the list.
inline int keep_shared_bytes(const Ffn& f) { return (2 * f.tiles * kMaskWords + 2 * f.panels + f.d_ff) * 4 + kListed * sizeof(ListedValue); }

template <typename T>
struct Keeper {
  const Ffn& f;
  const uint32_t* bits;  // of the block's union, a bit a neuron
  const int* before;     // neurons of the union before each word
  int block;
  bool all;  // the union is every neuron, where a neuron's rank is its number

  __device__ __forceinline__ int rank_of(int neuron) const {
    return all ? neuron : before[neuron >> 5] + __popc(bits[neuron >> 5] & ((1u << (neuron & 31)) - 1));
  }

  // The gate value of a row's neuron, the slot-th that fires in its tile.
  __device__ __forceinline__ uint16_t gate(int row, int neuron, int slot) const {
    const int64_t at = static_cast<int64_t>(row) * f.tiles + neuron / kTile;
    const int column = neuron % kTile;
    if (f.heads[at * kHead] > kSlots)  // past its slots, or marked so: it lies whole in `spill`
      return static_cast<const uint16_t*>(f.spill)[at * kTile + (((column >> 3) ^ (row & 7)) << 3) + (column & 7)];
    const int word = slot + 1;
    return (word < kHead ? f.heads[at * kHead + word] : f.tails[at * kTail + word - kHead]) >> 16;
  }

  // The hidden value at a row of the block and a rank of its union.
  __device__ __forceinline__ uint16_t hidden(int in_block, int rank) const {
    const unsigned char* panel = hidden_panel(f, block, rank / kPanelColumns);
    const int column = rank % kPanelColumns;
    return *reinterpret_cast<const uint16_t*>(panel + in_block * 128 + (((column >> 3) ^ (in_block & 7)) << 4) + (column & 7) * 2);
  }

  // Calls one(neuron, slot, at) for each neuron that a row fires, by a warp, a lane a word of 32 neurons. begin(many), of each 32 words, says
  // where the first of them is to stand in a list; `at` counts on from there.
  template <typename Begin, typename One>
  __device__ __forceinline__ void each(int row, int lane, Begin begin, One one) const {
    const int words = f.tiles * kMaskWords;
    for (int word0 = 0; word0 < words; word0 += 32) {
      const int word = word0 + lane;
      uint32_t left = word < words ? f.masks[static_cast<int64_t>(row) * words + word] : 0;
      if (const int outside = 32 * (word + 1) - f.d_ff; outside > 0) left &= outside < 32 ? ~0u >> outside : 0;
      int before = __popc(left);
      const int mine = before;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += other;
      }
      const int many = __shfl_sync(~0u, before, 31);
      before -= mine;
      int slot = before - __shfl_sync(~0u, before, lane / kMaskWords * kMaskWords);  // eight lanes have a tile
      for (int at = begin(many) + before; left; left &= left - 1, ++slot, ++at) one(32 * word + __ffs(left) - 1, slot, at);
    }
  }
};

// A word of another CTA's shared memory.
__device__ __forceinline__ int load_remote(const int* word, uint32_t cta) {
  int value;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(remote_address(word, cta)) : "memory");
  return value;
}

template <typename T>
__global__ void __launch_bounds__(kKeepThreads) keep(const Ffn f, const Kept k, const uint8_t* counted) {
  extern __shared__ uint32_t words_memory[];
  const int block = blockIdx.x / kKeepCtas, rank = cluster_rank(), thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int words = f.tiles * kMaskWords;
  uint32_t* bits = words_memory;
  int* before = reinterpret_cast<int*>(bits + words);
  int* counts = before + words;      // of each panel's values
  int* cursors = counts + f.panels;  // where its next one goes
  int* fires = cursors + f.panels;
  ListedValue* values = reinterpret_cast<ListedValue*>(fires + f.d_ff);
  __shared__ float sums[kKeepWarps];
  __shared__ int listed, base;
  let_next_launch();
  wait_for_launches();
  const int size = abs(f.union_sizes[block]);
  const Keeper<T> keeper{f, bits, before, block, size == f.d_ff};
  const uint16_t* list = f.unions + static_cast<int64_t>(block) * f.panels * kPanelColumns;
  const auto row_at = [&](int in_block) {  // -1: no row, or none that is finite
    const int row = f.order[block * kBlockRows + in_block];
    return row < f.rows && f.finite[row] ? row : -1;
  };

  if (thread == 0) listed = 0;
  for (int i = thread; i < words; i += kKeepThreads) bits[i] = 0;
  for (int i = thread; i < 2 * f.panels + f.d_ff; i += kKeepThreads) counts[i] = 0;
  for (int i = thread; rank == 0 && i < kBlockRows; i += kKeepThreads) k.order[block * kBlockRows + i] = f.order[block * kBlockRows + i];
  __syncthreads();
  for (int i = thread; i < (size + kPanelColumns - 1) / kPanelColumns * kPanelColumns; i += kKeepThreads) {
    const int neuron = list[i];
    if (rank == 0) k.unions[static_cast<int64_t>(block) * f.panels * kPanelColumns + i] = neuron;
    if (i < size) atomicOr(&bits[neuron >> 5], 1u << (neuron & 31));
  }
  __syncthreads();
  if (warp == 0) count_before(bits, before, words, lane);
  __syncthreads();

  for (int in_block = kKeepCtas * warp + rank; in_block < kBlockRows; in_block += kKeepCtas * kKeepWarps) {
    const int row = row_at(in_block);
    if (row < 0) continue;
    const bool counts_here = counted == nullptr || counted[row] != 0;
    const auto begin = [&](int many) { return __shfl_sync(~0u, lane == 0 && many > 0 ? atomicAdd(&listed, many) : 0, 0); };
    keeper.each(row, lane, begin, [&](int neuron, int slot, int at) {
      const int place = atomicAdd(&counts[keeper.rank_of(neuron) / kPanelColumns], 1);
      if (at < kListed)
        values[at] = {static_cast<uint16_t>(neuron), static_cast<uint16_t>(place), static_cast<uint8_t>(in_block), static_cast<uint8_t>(slot)};
      if (counts_here) atomicAdd(&fires[neuron], 1);
    });
  }
  __syncthreads();  // and no warp comes apart at the cluster's barrier
  cluster_sync();
  if (warp == 0) {  // the buckets' places, and in each those of this CTA's values: after those of the CTAs before it
    int sum = 0;
    int* starts = k.starts + static_cast<int64_t>(block) * (f.panels + 1);
    for (int panel0 = 0; panel0 < f.panels; panel0 += 32) {
      const int panel = panel0 + lane;
      int all = 0, others = 0;
      for (int cta = 0; cta < kKeepCtas && panel < f.panels; ++cta) {
        others += cta == rank ? all : 0;
        all += load_remote(counts + panel, cta);
      }
      int upto = all;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
      }
      if (panel < f.panels) cursors[panel] = sum + upto - all + others;
      if (panel < f.panels && rank == 0) starts[panel] = sum + upto - all;
      sum += __shfl_sync(~0u, upto, 31);
    }
    if (rank == 0) {
      __syncwarp();
      const int first = __shfl_sync(~0u, lane == 0 ? atomicAdd(k.used, sum) : 0, 0);
      for (int panel = lane; panel < f.panels; panel += 32) starts[panel] += first;
      if (lane == 0) base = first, starts[f.panels] = first + sum, k.union_sizes[block] = f.union_sizes[block];
    }
  }
  for (int i = thread; i < f.d_ff; i += kKeepThreads)
    if (fires[i] > 0) atomicAdd(k.fires + i, fires[i]);
  __syncthreads();
  cluster_sync();
  const int first = load_remote(&base, 0);

  const auto write = [&](int in_block, int row, int neuron, int slot, int in_union, int at) {
    k.positions[at] = (in_union / kPanelColumns % 4) << 13 | in_block << 6 | in_union % kPanelColumns;
    k.gates[at] = keeper.gate(row, neuron, slot);
    k.hidden[at] = keeper.hidden(in_block, in_union);
  };
  if (listed <= kListed) {
#pragma unroll 2
    for (int i = thread; i < listed; i += kKeepThreads) {
      const ListedValue v = values[i];
      const int in_union = keeper.rank_of(v.neuron);
      write(v.row, f.order[block * kBlockRows + v.row], v.neuron, v.slot, in_union, first + cursors[in_union / kPanelColumns] + v.place);
    }
  } else {
    for (int in_block = kKeepCtas * warp + rank; in_block < kBlockRows; in_block += kKeepCtas * kKeepWarps)
      if (const int row = row_at(in_block); row >= 0)
        keeper.each(row, lane, [](int) { return 0; }, [&](int neuron, int slot, int) {
          const int in_union = keeper.rank_of(neuron);
          write(in_block, row, neuron, slot, in_union, first + atomicAdd(&cursors[in_union / kPanelColumns], 1));
        });
  }
  // |h|: where it is not zero the panels have it, in an order of their own.
  float sum = 0.f;
  for (int in_block = kKeepCtas * warp + rank; in_block < kBlockRows; in_block += kKeepCtas * kKeepWarps) {
    const int row = row_at(in_block);
    if (row < 0 || (counted != nullptr && counted[row] == 0)) continue;
#pragma unroll 4
    for (int column = 2 * lane; column < (size + kPanelColumns - 1) / kPanelColumns * kPanelColumns; column += 64) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(hidden_panel(f, block, column / kPanelColumns) + in_block * 128 + column % kPanelColumns * 2);
      sum += fabsf(half_of<T>(pair, 0)) + fabsf(half_of<T>(pair, 1));
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (thread == 0) {
    float total = 0.f;
    for (int i = 0; i < kKeepWarps; ++i) total += sums[i];
    k.l1_parts[blockIdx.x] = total;
  }
  __syncthreads();
  cluster_sync();  // no CTA leaves while another may still read its counts
}

}  // namespace twell::hopper
