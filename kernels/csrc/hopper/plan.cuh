// The plan: for each block of 128 rows in their order, the union of the neurons that they fire, and the gate values over it as panels.
//
// A CTA a block (with few blocks several, that share out the panels), a thread a tile of a row. It reads the words twice: once
// for the union, a bit a neuron in shared memory, and once to put each value at its neuron's rank in the union, four panels at a
// time, which leave by bulk copy. Where nearly every neuron is in the union, or half of all values are, it takes every neuron:
// a value's place is then its neuron, and the products read whole weight tiles. Where nearly every tile is in `spill` besides,
// the values stay there, since a spilled row lies as a row of four panels does.
#pragma once

#include "hopper/gemm.cuh"

namespace twell::hopper {

constexpr int kPlanThreads = 512, kPlanCtas = 3;  // to a multiprocessor
constexpr int kPlanSplits = 6;  // CTAs that share out the panels of a block, at most: each finds the union anew
constexpr int kGroup = 4, kGroupColumns = kGroup * kPanelColumns;  // panels at a time; as many columns as a tile has
static_assert(kGroupColumns == kTile);

inline int plan_shared_bytes(int tiles) { return kGroup * kPanelBytes + tiles * (kTile / 32) * 2 * 4; }

// A panel's value (row, column 0..63) in bytes: rows of 128 bytes, 16-byte chunks swizzled as the tensor cores read them.
__device__ __forceinline__ int in_panel(int row, int column) {
  return row * 128 + (((column >> 3) ^ (row & 7)) << 4) + (column & 7) * 2;
}

// What the threads of a plan share, and how they go through the words of the block's finite rows.
struct Plan {
  const Ffn& f;
  const int* order;  // [128], of the block; -1: no row, or none that is finite
  int warp, lane;

  __device__ __forceinline__ int64_t at(int row, int tile) const { return static_cast<int64_t>(order[row]) * f.tiles + tile; }

  // Calls tile(row, tile, count) for every row and each of `many` tiles from `first` on; whole warps at a time, with count -1
  // where there is no row or none that is finite.
  template <typename Tile>
  __device__ __forceinline__ void each_tile(int first, int many, Tile tile) const {
    for (int i = warp * 32; i < kBlockRows * many; i += kPlanThreads) {
      const int row = (i + lane) / many, which = first + (i + lane) % many;
      tile(row, which, order[row] >= 0 ? static_cast<int>(f.heads[at(row, which) * kHead]) : -1);
    }
  }

  // Calls one(row, column, value) for the slots of a tile that holds all its neurons.
  template <typename One>
  __device__ __forceinline__ void each_slot(int row, int tile, int count, One one) const {
    const uint4* heads = reinterpret_cast<const uint4*>(f.heads + at(row, tile) * kHead);
    const uint4* tails = reinterpret_cast<const uint4*>(f.tails + at(row, tile) * kTail);
    for (int slot = 0; slot <= count && count > 0; slot += 4) {
      const uint4 v = slot < kHead ? heads[slot / 4] : tails[(slot - kHead) / 4];
      const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (slot + i > 0 && slot + i <= count)
          one(row, tile * kTile + static_cast<int>(word[i] & 0xffffu), static_cast<uint16_t>(word[i] >> 16));
    }
  }

  // Calls eight(row, column, values) for every eight columns of the tiles past their slots, the warp together.
  template <typename Eight>
  __device__ __forceinline__ void each_spilled(int row, int tile, int count, Eight eight) const {
    constexpr int kAhead = 4;  // loads in flight
    for (uint32_t over = __ballot_sync(~0u, count > kSlots); over;) {
      int where[kAhead];  // column * 128 + row, or -1
      uint4 v[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i, over &= over - 1) {
        where[i] = -1;
        if (over == 0) continue;
        const int r = __shfl_sync(~0u, row, __ffs(over) - 1), t = __shfl_sync(~0u, tile, __ffs(over) - 1);
        v[i] = static_cast<const uint4*>(f.spill)[at(r, t) * (kTile / 8) + lane];
        where[i] = (t * kTile + 8 * (lane ^ (order[r] & 7))) * kBlockRows + r;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (where[i] >= 0) eight(where[i] % kBlockRows, where[i] / kBlockRows, v[i]);
    }
  }
};

// How many bits stand before each word of `bits`, by one warp; returns how many there are.
__device__ __forceinline__ int count_before(const uint32_t* bits, int* before, int words, int lane) {
  int sum = 0;
  for (int w0 = 0; w0 < words; w0 += 32) {
    const int w = w0 + lane, mine = w < words ? __popc(bits[w]) : 0;
    int upto = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += other;
    }
    if (w < words) before[w] = sum + upto - mine;
    sum += __shfl_sync(~0u, upto, 31);
  }
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kPlanThreads, kPlanCtas) plan(const Ffn f, int processors) {
  extern __shared__ __align__(128) unsigned char shared[];  // panels [4][128][64]; bits [words]; before [words]
  const int words = f.tiles * (kTile / 32), block = block_to_take(f, blockIdx.x), m0 = block * kBlockRows;
  const int rows = min(kBlockRows, f.rows - m0);
  uint32_t* bits = reinterpret_cast<uint32_t*>(shared + kGroup * kPanelBytes);  // of the union, a bit a neuron
  int* before = reinterpret_cast<int*>(bits + words);                           // neurons of the union before each word
  __shared__ int values, packed, spilled, size;  // fired neurons, tiles within and past their slots, the union's size
  __shared__ int order[kBlockRows];
  __shared__ bool consecutive;  // is the order
  const int thread = threadIdx.x, lane = thread % 32;
  const Plan p{f, order, thread / 32, lane};

  for (int w = thread; w < words; w += kPlanThreads) bits[w] = 0;
  if (thread == 0) values = packed = spilled = 0;
  bool in_place = true;
  if (thread < kBlockRows) {
    const int row = f.blocks > 1 ? f.order[m0 + thread] : thread;  // a single block has no order of its own
    if (f.blocks == 1) f.order[thread] = row;
    order[thread] = row < f.rows && f.finite[row] ? row : -1;
    in_place = row == m0 + thread;
  }
  const bool together = __syncthreads_and(in_place);
  if (thread == 0) consecutive = together;
  const auto join = [&](int w, uint32_t more) {
    if ((reinterpret_cast<volatile uint32_t*>(bits)[w] & more) != more) atomicOr(&bits[w], more);
  };
  int mine = 0, within = 0;
  p.each_tile(0, f.tiles, [&](int row, int tile, int count) {
    mine += max(count, 0), within += count >= 0 && count <= kSlots;
    if (count > kSlots)
      spilled = 1;
    else
      p.each_slot(row, tile, count, [&](int, int column, uint16_t) { join(column >> 5, 1u << (column & 31)); });
  });
  mine = __reduce_add_sync(~0u, mine), within = __reduce_add_sync(~0u, within);
  if (lane == 0) atomicAdd(&values, mine), atomicAdd(&packed, within);
  __syncthreads();
  const bool half = 2ll * values >= static_cast<int64_t>(rows) * f.d_ff;
  if (spilled && !half)
    p.each_tile(0, f.tiles, [&](int row, int tile, int count) {
      p.each_spilled(row, tile, count, [&](int, int column, const uint4& v) {
        if (const uint32_t mask = positive(v)) join(column >> 5, mask << (column & 24));
      });
    });
  __syncthreads();
  if (thread < 32) {
    const int sum = count_before(bits, before, words, lane);
    if (lane == 0) size = half || 20ll * sum >= 17ll * f.d_ff ? f.d_ff : sum;
  }
  __syncthreads();

  const bool all = size == f.d_ff, stays = all && consecutive && f.w_up != nullptr && 8 * packed <= rows * f.tiles;
  const int panels = (size + kPanelColumns - 1) / kPanelColumns;
  uint16_t* list = f.unions + static_cast<int64_t>(block) * f.panels * kPanelColumns;
  for (int w = blockIdx.y == 0 ? thread : words; w < words; w += kPlanThreads) {
    int at = all ? 32 * w : before[w];
    for (uint32_t left = all ? ~0u : bits[w]; left && at < size; left &= left - 1) list[at++] = 32 * w + __ffs(left) - 1;
  }
  if (blockIdx.y == 0)
    for (int i = size + thread; i < panels * kPanelColumns; i += kPlanThreads) list[i] = 0;
  if (blockIdx.y == 0 && thread == 0) {
    f.union_sizes[block] = stays ? -size : size;
    if (f.w_up != nullptr) {
      int chunk = kGroup;  // panels to a task: fewer where tasks would be too few for the processors
      while (chunk > 1 && f.blocks * ((panels + chunk - 1) / chunk) < processors) chunk /= 2;
      const int tasks = (panels + chunk - 1) / chunk;
      int2* task = reinterpret_cast<int2*>(f.tasks) + 1 + atomicAdd(f.tasks, tasks);
      for (int panel = 0; panel < panels; panel += chunk)
        *task++ = make_int2(block, 16 * panel + 8 * consecutive + min(chunk, panels - panel));
    }
  }

  if (stays) {  // nearly every tile is in `spill` as a panel would have it; the others join them
    if (blockIdx.y > 0) return;
    p.each_tile(0, f.tiles, [&](int row, int tile, int count) {
      if (count < 0 || count > kSlots) return;
      uint4* chunks = static_cast<uint4*>(f.spill) + p.at(row, tile) * (kTile / 8);
      for (int i = 0; i < kTile / 8; ++i) chunks[i] = make_uint4(0, 0, 0, 0);
      p.each_slot(row, tile, count, [&](int r, int column, uint16_t value) {
        reinterpret_cast<uint16_t*>(chunks + ((column % kTile / 8) ^ (r & 7)))[column % 8] = value;
      });
    });
    return;
  }

  int low = 0;
  for (int group = blockIdx.y; group * kGroup < panels; group += gridDim.y) {
    const int first = group * kGroupColumns;  // rank
    if (all) low = group;
    while (!all && low + 1 < f.tiles && before[(low + 1) * (kTile / 32)] <= first) ++low;
    int high = low;
    while (!all && high + 1 < f.tiles && before[(high + 1) * (kTile / 32)] < first + kGroupColumns) ++high;
    if (thread == 0) bulk_wait_read<0>();
    __syncthreads();
    for (int i = thread; i < kGroup * kPanelBytes / 16; i += kPlanThreads)
      reinterpret_cast<uint4*>(shared)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    const auto place = [&](int row, int rank) { return shared + (rank >> 6) * kPanelBytes + in_panel(row, rank & 63); };
    const auto put = [&](int row, int column, uint16_t value) {
      const int word = column >> 5, rank = all ? column : before[word] + __popc(bits[word] & ((1u << (column & 31)) - 1));
      if (static_cast<unsigned>(rank - first) < kGroupColumns) *reinterpret_cast<uint16_t*>(place(row, rank - first)) = value;
    };
    p.each_tile(low, high - low + 1, [&](int row, int tile, int count) {
      if (count <= kSlots) p.each_slot(row, tile, count, put);
      if (spilled)
        p.each_spilled(row, tile, count, [&](int r, int column, const uint4& v) {
          if (all) {
            *reinterpret_cast<uint4*>(place(r, column - first)) = v;
            return;
          }
          const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const uint16_t value = static_cast<uint16_t>(pair[e / 2] >> (16 * (e & 1)));
            if (value) put(r, column + e, value);
          }
        });
    });
    fence_async_proxy();
    __syncthreads();
    if (thread == 0) {
      bulk_store(hidden_panel(f, block, group * kGroup), shared, min(kGroup, panels - group * kGroup) * kPanelBytes);
      bulk_commit();
    }
  }
  if (thread == 0) bulk_wait<0>();
}

}  // namespace twell::hopper
