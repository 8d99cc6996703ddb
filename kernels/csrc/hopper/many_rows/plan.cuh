// The plan: for each block of 128 rows in their order, the union of the neurons that they fire, and the gate values over it as panels.
//
// A CTA a block (several that share out the panels, where blocks are few or loud). It reads what the rows fire, a bit a neuron, for the
// union, where the gate has not put that together already; then their words, a thread a tile of a row (four in loud blocks), and what lies
// in `spill`, a warp a tile of a row, to put each value at its neuron's rank in the union, four panels at a time, which leave by bulk copy.
// Where nearly every neuron is in the union, or half of all values are, it takes every neuron: a value's place is then its neuron, and the
// products read whole weight tiles. If such a block's rows are consecutive besides, its values stay in `spill`, where a row lies as a row
// of four panels does, and those of the other tiles join them there.
#pragma once

#include "common/bits.cuh"
#include "hopper/many_rows/row_order.cuh"

namespace twell::hopper {

constexpr int kPlanWarps = kPlanThreads / 32;
constexpr int kPlanCtas = 3;  // to a multiprocessor
// CTAs that share out the panels of a block, at most: each finds the union anew. More of the first block of a window, and at least so many:
// in order of nnz it is the one with most to do.
constexpr int kPlanSplits = 16, kMaxHighNnzSplits = 24, kMinHighNnzSplits = 4;
constexpr int kGroup = 4, kGroupColumns = kGroup * kPanelColumns;  // panels at a time; as many columns as a tile has
static_assert(kGroupColumns == kTile);
constexpr int kOffsetTiles = 8;  // tiles whose columns' places are found at once
constexpr int kHighNnzReaders = kPlanThreads / kBlockRows;  // threads to a row in loud blocks
constexpr uint16_t kNoOffset = 0xffff;  // of a place in the panels: the group does not have that neuron

inline int plan_shared_bytes(int tiles) { return kGroup * kPanelBytes + tiles * (kTile / 32) * 2 * 4; }

// A value's place in a group's panels, in bytes: a column's, ^ a row's. A row has 128 bytes of a panel, their 16-byte chunks swizzled as
// the tensor cores read them.
__device__ __forceinline__ uint32_t offset_of_column(int column) {
  return (column / kPanelColumns * kPanelBytes) | (column % kPanelColumns * 2);
}
__device__ __forceinline__ uint32_t offset_of_row(int row) { return row * 128 | (row & 7) << 4; }

__device__ __forceinline__ void put(unsigned char* panels, int row, uint32_t column_offset, uint16_t value) {
  if (column_offset != kNoOffset) *reinterpret_cast<uint16_t*>(panels + (column_offset ^ offset_of_row(row))) = value;
}
// Eight values that follow each other, and their columns' places, two to a word.
__device__ __forceinline__ void put_eight(unsigned char* panels, int row, const uint4& column_offsets, const uint4& v) {
  const uint32_t offset[4] = {column_offsets.x, column_offsets.y, column_offsets.z, column_offsets.w}, pair[4] = {v.x, v.y, v.z, v.w};
  const uint32_t first = offset[0] & 0xffff, last = offset[3] >> 16;
  if (first % 16 == 0 && last == first + 14) {  // a chunk
    *reinterpret_cast<uint4*>(panels + (first ^ offset_of_row(row))) = v;
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) put(panels, row, offset[e / 2] >> 16 * (e % 2) & 0xffff, pair[e / 2] >> 16 * (e % 2));
  }
}

// What the threads of a plan share, and how they go through the words of the block's finite rows.
struct Plan {
  const Ffn& f;
  const int* order;  // [128], of the block; -1: no row, or none that is finite
  int warp, lane;

  __device__ __forceinline__ int64_t at(int row, int tile) const { return static_cast<int64_t>(order[row]) * f.tiles + tile; }

  // A tile's first word, or -1 where there is no row or none that is finite.
  __device__ __forceinline__ int first_word(int row, int tile) const {
    return order[row] >= 0 ? static_cast<int>(f.heads[at(row, tile) * kHead]) : -1;
  }

  // Calls tile(row, tile, first word) for every row and each of `many` tiles from `first` on, whole warps at a time, row after row.
  template <typename Tile>
  __device__ __forceinline__ void each_tile(int first, int many, Tile tile) const {
    for (int i = warp * 32; i < kBlockRows * many; i += kPlanThreads) {
      const int row = static_cast<int>(__fdividef(i + lane + 0.5f, many)), which = first + i + lane - row * many;
      tile(row, which, first_word(row, which));
    }
  }

  // Calls one(column of the tile, value) for a reader's slots of a tile that holds all its neurons.
  template <int kReaders, typename One>
  __device__ __forceinline__ void each_slot(int row, int tile, int count, int reader, One one) const {
    for (int first = reader * kHead; first <= count && count > 0; first += kReaders * kHead) {
      const uint32_t* words = first == 0 ? f.heads + at(row, tile) * kHead : f.tails + at(row, tile) * kTail + first - kHead;
      const uint4 low = reinterpret_cast<const uint4*>(words)[0], high = reinterpret_cast<const uint4*>(words)[1];
      const uint32_t word[kHead] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kHead; ++i)
        if (first + i > 0 && first + i <= count)
          one(static_cast<int>(word[i] & 0xffffu), static_cast<uint16_t>(word[i] >> 16));
    }
  }

  // Puts the rows of tiles ends[0] to ends[1] into the panels, each column where `places` has it, or nowhere: those in `spill`, if any,
  // and those in words, if so. Of kOffsetTiles tiles at a time, find_offsets(first of them) is called. A warp takes some rows of one tile, so
  // that all warps have rows past their slots, then of the next.
  template <typename Find>
  __device__ __forceinline__ void put_tiles(unsigned char* panels, const uint16_t* column_offsets, const int* ends, bool in_words, bool spilled,
                                            Find find_offsets) const {
    constexpr int kAhead = 2;  // loads in flight
    const int row = threadIdx.x / kHighNnzReaders, reader = threadIdx.x % kHighNnzReaders;
    int next = first_word(row, ends[0]);
#pragma unroll 1
    for (int tile = ends[0]; tile <= ends[1]; ++tile) {
      const int word = next, at = (tile - ends[0]) % kOffsetTiles;
      if (at == 0) find_offsets(tile);
      if (tile < ends[1]) next = first_word(row, tile + 1);
      const uint16_t* of_tile = column_offsets + at * kTile;
      if (in_words && word <= kSlots)
        each_slot<kHighNnzReaders>(row, tile, word, reader, [&](int column, uint16_t value) { put(panels, row, of_tile[column], value); });
      const uint4 eight = reinterpret_cast<const uint4*>(of_tile)[lane];  // this lane's columns
      const bool needs_task = (eight.x & eight.y & eight.z & eight.w) != ~0u;
      const uint4* values = static_cast<const uint4*>(f.spill) + tile * (kTile / 8);
      for (uint32_t over = __ballot_sync(~0u, spilled && word > kSlots && reader == 0), now = over; over; now = over) {
        uint4 v[kAhead];
        const auto next_row = [&](uint32_t& lanes) {
          const int at = (warp * 32 + __ffs(lanes) - 1) / kHighNnzReaders;
          lanes &= lanes - 1;
          return at;
        };
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
          if (over)
            if (const int r = order[next_row(over)]; needs_task) v[i] = values[int64_t{r} * (f.tiles * (kTile / 8)) + (lane ^ (r & 7))];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
          if (now)
            if (const int r = next_row(now); needs_task) put_eight(panels, r, eight, v[i]);
      }
    }
  }
};

// The first block of each of the `windows` has `high_nnz_splits` CTAs, and the others have `splits` each.
template <typename T>
__global__ void __launch_bounds__(kPlanThreads, kPlanCtas) plan(const Ffn f, int windows, int high_nnz_splits, int splits, int processors) {
  extern __shared__ __align__(128) unsigned char panels_memory[];  // panels [4][128][64], before them a Window; bits, before [words]
  const bool in_high_nnz_block = blockIdx.x < windows * high_nnz_splits;
  const int at = in_high_nnz_block ? blockIdx.x : blockIdx.x - windows * high_nnz_splits, ctas = in_high_nnz_block ? high_nnz_splits : splits;
  const int block = block_to_take(f, (in_high_nnz_block ? 0 : windows) + at / ctas);
  const int words = f.tiles * (kTile / 32), m0 = block * kBlockRows, rows = min(kBlockRows, f.rows - m0);
  uint32_t* bits = reinterpret_cast<uint32_t*>(panels_memory + kGroup * kPanelBytes);  // of the union, a bit a neuron
  int* before = reinterpret_cast<int*>(bits + words);  // neurons of the union before each word
  __shared__ int values, size;                 // fired neurons, and the union's size
  __shared__ int warp_union_sizes[kPlanThreads / 32];  // neurons of the union of rows in place, as a warp has found them
  __shared__ uint32_t sparse_tiles[8];                // of rows in place, tiles, of 256 at most, that the gate did not leave whole; a bit each
  __shared__ uint32_t up_done_tiles[8];                 // and those whose up product is there
  __shared__ int order[kBlockRows];
  __shared__ int ends[2];  // the tiles that have a group's neurons: the first, the last
  __shared__ __align__(16) uint16_t column_offsets[kOffsetTiles * kTile];
  const int thread = threadIdx.x, lane = thread % 32;
  const Plan p{f, order, thread / 32, lane};

  if (thread < 8) sparse_tiles[thread] = 0, up_done_tiles[thread] = 0;
  if (thread == 0) values = 0;
  __syncthreads();
  let_next_launch();
  wait_for_launches();
  if (blockIdx.x == 0)
    for (int i = thread; i < kParts * kPartWarps; i += kPlanThreads) f.part_ready[i] = 0;
  Window& window = *reinterpret_cast<Window*>(panels_memory);
  const bool consecutive = read_window(f, window, block, [&] {  // the union, should rows stay: the gate has it, by tiles
    int mine = 0;
#pragma unroll 1
    for (int w = thread; w < words; w += kPlanThreads) {
      const int tile = w / (kTile / 32), left = f.d_ff - 32 * w;
      const uint32_t inside = left <= 0 ? 0 : left < 32 ? (1u << left) - 1 : ~0u;  // rows that are not finite fire past the last neuron
      const uint32_t head = f.heads[(static_cast<int64_t>(m0) * f.tiles + tile) * kHead];
      const uint32_t fired = f.fired[static_cast<int64_t>(block) * words + w];
      const bool taken = f.dense_tiles != nullptr && DensePairs(f).taken(m0 / kPairRows * f.tiles + tile);
      const bool whole = head & kDenseTile;  // as of the others' rows: nearly all of it fires, so let all
      const uint32_t word = whole ? inside : fired & inside;
      bits[w] = word, mine += __popc(word);
      if (!whole && w % (kTile / 32) == 0) atomicOr(&sparse_tiles[tile >> 5], 1u << (tile & 31));
      if (taken && w % (kTile / 32) == 0) atomicOr(&up_done_tiles[tile >> 5], 1u << (tile & 31));
    }
    mine = __reduce_add_sync(~0u, mine);
    if (lane == 0) warp_union_sizes[thread / 32] = mine;
  });
  const int split = at % ctas, splits_here = consecutive ? splits : ctas;
  if (split >= splits_here) return;  // rows in place are no louder than others
  if (!consecutive) sort_window(f, window);
  const int first_row = m0 % kWindow;
  if (thread < kBlockRows) {
    const uint32_t key = consecutive ? window.keys[first_row + thread] : window.block[thread];
    const int row = m0 - first_row + Window::row_of(key);
    const bool there = row < f.rows, finite = there && window.finite(key);
    const int nnz = there ? Window::nnz_of(f, key) : 0;
    order[thread] = finite ? row : -1;
    if (!consecutive) {
      const int fired = __reduce_add_sync(~0u, nnz);
      if (lane == 0) atomicAdd(&values, fired);
    }
    if (split == 0) {
      f.order[m0 + thread] = row;
      const bool finite_up = window.finite_up(key);
      if (there) f.finite[row] = finite && finite_up;
      if (there && f.nnz != nullptr) f.nnz[row] = finite_up ? nnz : 0;
    }
  }
  const auto runs_dense = [&](int neurons, int fired) {
    return nearly_all(neurons, f.d_ff) || 2ll * fired >= static_cast<int64_t>(rows) * f.d_ff;
  };
  bool ranks_needed = true;  // else the union is known to be everything, where a neuron's rank is its number
  if (consecutive) {
    int fired = 0;
#pragma unroll
    for (int i = 0; i < kBlockRows / 32; ++i) fired += window.sums[first_row / 32 + i];
    ranks_needed = !runs_dense(__reduce_add_sync(~0u, lane < kPlanThreads / 32 ? warp_union_sizes[lane] : 0), fired);
    if (thread == 0) values = fired, size = f.d_ff;
  } else {
    for (int w = thread; w < words; w += kPlanThreads) bits[w] = 0;
    __syncthreads();
    const int quads = 2 * f.tiles;  // a warp takes some rows, a lane four words of them at a time
#pragma unroll 1
    for (int quad = lane; quad < quads; quad += 32) {
      uint32_t any[4] = {};
#pragma unroll
      for (int i = 0; i < kBlockRows / kPlanWarps; ++i) {
        const int at = order[p.warp + i * kPlanWarps];
        const uint4 v = at < 0 ? uint4{} : reinterpret_cast<const uint4*>(f.masks)[static_cast<int64_t>(at) * quads + quad];
        any[0] |= v.x, any[1] |= v.y, any[2] |= v.z, any[3] |= v.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (any[i]) atomicOr(&bits[4 * quad + i], any[i]);
    }
    __syncthreads();
  }
  if (ranks_needed && thread < 32) {
    const int sum = count_before(bits, before, words, lane);
    if (lane == 0) size = runs_dense(sum, values) ? f.d_ff : sum;
  }
  __syncthreads();

  const bool all = size == f.d_ff, stays_in_spill = all && consecutive && f.w_up != nullptr;
  const int panels = (size + kPanelColumns - 1) / kPanelColumns;
  const auto rank_of = [&](int column) {
    const int word = column >> 5;
    return all ? column : before[word] + __popc(bits[word] & ((1u << (column & 31)) - 1));
  };
  uint16_t* list = f.unions + static_cast<int64_t>(block) * f.panels * kPanelColumns;
  const int filled = max(panels, 1) * kPanelColumns;  // of no neuron too: `down` reads ahead before it knows
  if (all) {
    for (int i = split * kPlanThreads + thread; i < filled; i += splits_here * kPlanThreads) list[i] = i < f.d_ff ? i : 0;
  } else if (split == splits_here - 1) {  // it has the fewest panels
#pragma unroll 1
    for (int neuron = thread; neuron < f.d_ff; neuron += kPlanThreads)
      if (bits[neuron >> 5] >> (neuron & 31) & 1) list[rank_of(neuron)] = neuron;
    for (int i = size + thread; i < filled; i += kPlanThreads) list[i] = 0;
  }
  if (split == splits_here - 1 && thread == 0) {
    f.union_sizes[block] = stays_in_spill ? -size : size;
    if (f.w_up != nullptr) {
      int chunk = kGroup;  // panels to a task: fewer where tasks would be too few for the processors
      while (chunk > 1 && f.blocks * ((panels + chunk - 1) / chunk) < processors) chunk /= 2;
      const auto needs_task = [&](int panel) { return !(stays_in_spill && up_done_tiles[panel / (32 * kGroup)] >> (panel / kGroup & 31) & 1); };
      int tasks = 0;
#pragma unroll 1
      for (int panel = 0; panel < panels; panel += chunk) tasks += needs_task(panel);
      int2* task = reinterpret_cast<int2*>(f.tasks) + (tasks > 0 ? atomicAdd(f.row_sums + f.rows, tasks) : 0);
#pragma unroll 1
      for (int panel = 0; panel < panels && tasks > 0; panel += chunk)
        if (needs_task(panel)) *task++ = make_int2(block, 32 * panel + 16 * all + 8 * consecutive + min(chunk, panels - panel));
    }
  }

  for (int group = split; group * kGroup < panels; group += splits_here) {
    if (stays_in_spill && !(sparse_tiles[group >> 5] >> (group & 31) & 1)) continue;  // a group is a tile there
    const int first = group * kGroupColumns;                          // rank
    if (p.warp == 0) {
      int low = all ? group : 0, high = low;
#pragma unroll 1
      for (int tile0 = 1; !all && tile0 < f.tiles; tile0 += 32) {
        const int rank = tile0 + lane < f.tiles ? before[(tile0 + lane) * (kTile / 32)] : 1 << 30;  // of the tile's first
        low += __popc(__ballot_sync(~0u, rank <= first)), high += __popc(__ballot_sync(~0u, rank < first + kGroupColumns));
      }
      if (lane == 0) ends[0] = low, ends[1] = high;
    }
    const auto offsets_of_eight = [&](int column) {  // of eight columns from there on, two to a word
      const uint32_t in_union = all ? ~0u : bits[column >> 5] >> (column & 24);
      uint32_t pairs[4] = {};
      int at = rank_of(column) - first;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const bool has = in_union >> e & 1;
        pairs[e / 2] |= (has && static_cast<unsigned>(at) < kGroupColumns ? offset_of_column(at) : kNoOffset) << 16 * (e % 2);
        at += has;
      }
      return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    };
    if (thread < kBlockRows) bulk_wait_read<0>();
    __syncthreads();
    for (int i = thread; i < kGroup * kPanelBytes / 16; i += kPlanThreads)
      reinterpret_cast<uint4*>(panels_memory)[i] = make_uint4(0, 0, 0, 0);
    const bool high_nnz = stays_in_spill || values > rows * f.tiles * (kSlots / 3);
    bool spilled = false;
    if (!high_nnz) {
      __syncthreads();
      p.each_tile(ends[0], ends[1] + 1 - ends[0], [&](int row, int tile, int word) {
        spilled |= word > kSlots;
        if (word <= kSlots)
          p.each_slot<1>(row, tile, word, 0, [&](int column, uint16_t value) {
            const int at = rank_of(tile * kTile + column) - first;
            put(panels_memory, row, static_cast<unsigned>(at) < kGroupColumns ? offset_of_column(at) : kNoOffset, value);
          });
      });
    }
    if (high_nnz || __syncthreads_or(spilled))
      p.put_tiles(panels_memory, column_offsets, ends, high_nnz, !stays_in_spill, [&](int tile) {
        if (tile > ends[0]) __syncthreads();
        if (thread < kOffsetTiles * kTile / 8 && tile + thread / (kTile / 8) <= ends[1])
          reinterpret_cast<uint4*>(column_offsets)[thread] = offsets_of_eight(tile * kTile + 8 * thread);
        __syncthreads();
      });
    fence_async_proxy();
    __syncthreads();
    if (stays_in_spill) {  // a row in words becomes a row of `spill`
      if (const int word = thread < kBlockRows ? p.first_word(thread, group) : -1; word >= 0 && word <= kSlots)
        for (int panel = 0; panel < kGroup; ++panel)
          bulk_store(static_cast<T*>(f.spill) + p.at(thread, group) * kTile + panel * kPanelColumns,
                     panels_memory + panel * kPanelBytes + thread * (kPanelColumns * 2), kPanelColumns * 2);
    } else if (thread == 0) {
      bulk_store(hidden_panel(f, block, group * kGroup), panels_memory, min(kGroup, panels - group * kGroup) * kPanelBytes);
    }
    bulk_commit();
  }
  bulk_wait<0>();
}

}  // namespace twell::hopper
