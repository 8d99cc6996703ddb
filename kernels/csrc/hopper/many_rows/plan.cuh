// The plan: for each block of 128 rows in their order, the union of the neurons that fire in them, and the gate values
// over it as panels.
//
// One CTA for each block, or several that divide the panels if blocks are few or have high nnz. It reads the bits of
// what the rows fire to make the union, unless the gate has made it already; then their words, a thread for a tile of a
// row (four in blocks of high nnz), and tiles in `spill`, a warp for a tile of a row. It writes each value at its
// neuron's rank in the union, four panels at a time, which leave by bulk copy. If nearly every neuron is in the union,
// or half of all values are, the union is every neuron: a value's position is then its neuron, and the products read
// whole weight tiles. If the rows of such a block are also consecutive, its values stay in `spill`, where a row has the
// layout of a row of four panels, and the values of other tiles are added there.
//
// CTAs begin as those of the gate's kernel leave, while others of these make the last up products. A block whose tiles
// are all dense, in a window most of whose tiles are, is planned at once; what others wait for is the gate's end.
#pragma once

#include "common/bits.cuh"
#include "hopper/many_rows/panels.cuh"

namespace twell::hopper {

constexpr int kPlanCtas = 3;  // CTAs of a multiprocessor
// Most CTAs that divide the panels of a block; each makes the union. The first block of a window has more, and at least
// this many: in order of nnz it has most values.
constexpr int kPlanSplits = 16, kMaxHighNnzSplits = 24, kMinHighNnzSplits = 4;

inline int plan_shared_bytes(int tiles) { return kGroup * kPanelBytes + tiles * (kTile / 32) * 2 * 4; }

// What a CTA shares besides the panels and the bits of the union.
struct PlanShared {
  int values, size;     // how many values the block's rows fire; the union's size
  bool stays_in_spill;  // the union is every neuron, and `up` reads the gate values where the gate has written them
  int warp_union_sizes[kPlanWarps];  // for rows in place: how many neurons of the union each warp has counted
  // for rows in place, a bit for each of at most 256 tiles: the gate has not written it dense
  uint32_t sparse_tiles[8];
  uint32_t up_done_tiles[8];  // likewise: the gate's kernel computes its up product
  int order[kBlockRows];      // the block's rows; -1: no row, or none that is finite
  int ends[2];                // the first and the last tile that have neurons of a group
  __align__(16) uint16_t column_offsets[kOffsetTiles * kTile];
};

// The block that a CTA plans, and its panels: groups split, split + splits, …
struct PlanWork {
  int block, m0, rows;       // m0: the first row, if rows stay in place; rows: how many of 128 exist
  int split, splits;         // splits: CTAs of this block that have panels
  bool consecutive = false;  // whether rows stay in place
  // CTAs that write the list, of which the last one writes size and tasks. Where values stay, the first one writes all:
  // it may be done before others begin, or they before it.
  __device__ __forceinline__ int writers(bool stays_in_spill) const { return stays_in_spill ? 1 : splits; }
  // The first block of each of the `windows` has `high_nnz_splits` CTAs, and the others have `others` each.
  __device__ __forceinline__ PlanWork(const Ffn& f, int windows, int high_nnz_splits, int others) {
    const bool high_nnz = blockIdx.x < windows * high_nnz_splits;
    const int at = high_nnz ? blockIdx.x : blockIdx.x - windows * high_nnz_splits;
    splits = high_nnz ? high_nnz_splits : others, split = at % splits;
    block = block_to_take(f, (high_nnz ? 0 : windows) + at / splits);
    m0 = block * kBlockRows, rows = min(kBlockRows, f.rows - m0);
  }
};

// Whether it is certain by now that all tiles of a block are dense, and most of its window's. By all threads.
__device__ __forceinline__ bool is_settled(const Ffn& f, int m0) {
  bool settled = f.dense_tiles != nullptr;
  if (settled && threadIdx.x < f.tiles)
    settled = DensePairs(f).is_written(f, m0 / kPairRows * f.tiles + threadIdx.x) && is_mostly_dense(f, m0);
  return __syncthreads_and(settled);
}

// Step 1, if rows may stay in place: the union as the gate has made it, tile by tile, and the gate's flags of its
// tiles.
__device__ __forceinline__ void unite_in_place(const Ffn& f, PlanShared& s, const PlanWork& work, const Union& u) {
  const int thread = threadIdx.x;
  int mine = 0;
#pragma unroll 1
  for (int w = thread; w < u.words; w += kPlanThreads) {
    const int tile = w / (kTile / 32), left = f.d_ff - 32 * w;
    // rows that are not finite fire past the last neuron
    const uint32_t inside = first_bits(left);
    const uint32_t head = f.heads[(static_cast<int64_t>(work.m0) * f.tiles + tile) * kHead];
    const uint32_t fired = f.fired[static_cast<int64_t>(work.block) * u.words + w];
    const int of_pair = work.m0 / kPairRows * f.tiles + tile;
    const bool up_done = f.dense_tiles != nullptr && DensePairs(f).taken(of_pair);
    // other rows have the flag too: nearly all of the tile fires, so the union takes all of it
    const bool dense = head & kDenseTile || (f.dense_tiles != nullptr && DensePairs(f).is_written(f, of_pair) &&
                                             is_mostly_dense(f, work.m0));
    const uint32_t word = dense ? inside : fired & inside;
    u.bits[w] = word, mine += __popc(word);
    if (!dense && w % (kTile / 32) == 0) atomicOr(&s.sparse_tiles[tile >> 5], 1u << (tile & 31));
    if (up_done && w % (kTile / 32) == 0) atomicOr(&s.up_done_tiles[tile >> 5], 1u << (tile & 31));
  }
  mine = __reduce_add_sync(~0u, mine);
  if (thread % 32 == 0) s.warp_union_sizes[thread / 32] = mine;
}

// Step 2: the block's rows to s.order, and what each row's results need. By the first 128 threads.
__device__ __forceinline__ void take_rows(const Ffn& f, PlanShared& s, const PlanWork& work, const Window& window) {
  const int thread = threadIdx.x, first_row = work.m0 % kWindow;
  const uint32_t key = work.consecutive ? window.keys[first_row + thread] : window.block[thread];
  const int row = work.m0 - first_row + Window::row_of(key);
  const bool there = row < f.rows, finite = there && window.finite(key);
  const int nnz = there ? Window::nnz_of(f, key) : 0;
  s.order[thread] = finite ? row : -1;
  if (!work.consecutive) {
    const int fired = __reduce_add_sync(~0u, nnz);
    if (thread % 32 == 0) atomicAdd(&s.values, fired);
  }
  if (work.split == 0) {
    f.order[work.m0 + thread] = row;
    const bool finite_up = window.finite_up(key);
    if (there) f.finite[row] = finite && finite_up;
    if (there && f.nnz != nullptr) f.nnz[row] = finite_up ? nnz : 0;
  }
}

// Step 3, for rows in another order: the union of their masks. A warp takes some rows, a lane four words of them at a
// time.
__device__ __forceinline__ void unite_masks(const Ffn& f, const PlanShared& s, const Union& u) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  for (int w = thread; w < u.words; w += kPlanThreads) u.bits[w] = 0;
  __syncthreads();
  const int quads = 2 * f.tiles;
#pragma unroll 1
  for (int quad = lane; quad < quads; quad += 32) {
    uint32_t any[4] = {};
#pragma unroll
    for (int i = 0; i < kBlockRows / kPlanWarps; ++i) {
      const int row = s.order[warp + i * kPlanWarps];
      const uint4 v =
          row < 0 ? uint4{} : reinterpret_cast<const uint4*>(f.masks)[static_cast<int64_t>(row) * quads + quad];
      any[0] |= v.x, any[1] |= v.y, any[2] |= v.z, any[3] |= v.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (any[i]) atomicOr(&u.bits[4 * quad + i], any[i]);
  }
  __syncthreads();
}

// Step 4: the union's size, and every neuron's rank, unless all neurons are taken. By all threads.
__device__ __forceinline__ void size_union(const Ffn& f, PlanShared& s, const PlanWork& work, const Window& window,
                                           Union& u) {
  const int thread = threadIdx.x, lane = thread % 32;
  const auto runs_dense = [&](int neurons, int fired) {
    return nearly_all(neurons, f.d_ff) || 2ll * fired >= static_cast<int64_t>(work.rows) * f.d_ff;
  };
  bool needs_ranks = true;
  if (work.consecutive) {
    int fired = 0;
#pragma unroll
    for (int i = 0; i < kBlockRows / 32; ++i) fired += window.sums[work.m0 % kWindow / 32 + i];
    needs_ranks = !runs_dense(__reduce_add_sync(~0u, lane < kPlanWarps ? s.warp_union_sizes[lane] : 0), fired);
    if (thread == 0) s.values = fired, s.size = f.d_ff;
  } else {
    unite_masks(f, s, u);
  }
  if (needs_ranks && thread < 32) {
    const int sum = count_before(u.bits, u.before, u.words, lane);
    if (lane == 0) s.size = runs_dense(sum, s.values) ? f.d_ff : sum;
  }
  if (thread == 0) s.stays_in_spill = s.size == f.d_ff && work.consecutive && f.w_up != nullptr;
  __syncthreads();
  u.all = s.size == f.d_ff;
}

// Step 5: the union as a list of neurons, by which `up` and `down` gather weights.
__device__ __forceinline__ void write_list(const Ffn& f, const PlanShared& s, const PlanWork& work, const Union& u) {
  uint16_t* list = f.unions + static_cast<int64_t>(work.block) * f.panels * kPanelColumns;
  // also for an empty union: `down` reads ahead before it knows the size
  const int thread = threadIdx.x, filled = max(u.panels(), 1) * kPanelColumns;
  if (u.all) {
    const int shares = work.writers(s.stays_in_spill);
    for (int i = work.split * kPlanThreads + thread; i < filled && work.split < shares; i += shares * kPlanThreads)
      list[i] = i < f.d_ff ? i : 0;
  } else if (work.split == work.splits - 1) {  // the CTA with the fewest panels
#pragma unroll 1
    for (int neuron = thread; neuron < f.d_ff; neuron += kPlanThreads)
      if (u.bits[neuron >> 5] >> (neuron & 31) & 1) list[u.rank_of(neuron)] = neuron;
    for (int i = s.size + thread; i < filled; i += kPlanThreads) list[i] = 0;
  }
}

// Step 6: the block's tasks for the up product, without those that the gate's kernel has done. By one thread.
__device__ __forceinline__ void write_tasks(const Ffn& f, const PlanShared& s, const PlanWork& work, const Union& u,
                                            int processors) {
  const int panels = u.panels();
  int chunk = kGroup;  // panels of a task: fewer if there would be too few tasks for the processors
  while (chunk > 1 && f.blocks * ((panels + chunk - 1) / chunk) < processors) chunk /= 2;
  const auto needs_task = [&](int panel) {
    return !(s.stays_in_spill && s.up_done_tiles[panel / (32 * kGroup)] >> (panel / kGroup & 31) & 1);
  };
  int tasks = 0;
#pragma unroll 1
  for (int panel = 0; panel < panels; panel += chunk) tasks += needs_task(panel);
  int2* task = reinterpret_cast<int2*>(f.tasks) + (tasks > 0 ? atomicAdd(f.row_sums + f.rows, tasks) : 0);
#pragma unroll 1
  for (int panel = 0; panel < panels && tasks > 0; panel += chunk)
    if (needs_task(panel))
      *task++ = make_int2(work.block, 32 * panel + 16 * u.all + 8 * work.consecutive + min(chunk, panels - panel));
}

// All steps for a block that is settled: rows stay in place, and values in `spill`. Up products that the gate's kernel
// has not taken by now are left to `up`. Whether a row is finite is known once that kernel has ended.
__device__ __forceinline__ void plan_settled(const Ffn& f, PlanShared& s, const PlanWork& work, int processors) {
  const Union u{nullptr, nullptr, 0, s.size, true};
  const int thread = threadIdx.x, row = work.m0 + thread;
  if (thread < kBlockRows) f.order[row] = row;
  if (thread < f.tiles && DensePairs(f).leave(work.m0 / kPairRows * f.tiles + thread))
    atomicOr(&s.up_done_tiles[thread >> 5], 1u << (thread & 31));
  if (thread == 0) s.size = f.d_ff, s.stays_in_spill = true;
  __syncthreads();
  write_list(f, s, work, u);
  if (thread == 0) f.union_sizes[work.block] = -f.d_ff, write_tasks(f, s, work, u, processors);
  wait_for_launches();  // for the gate's kernel, since `up` waits for this one alone
  if (thread < kBlockRows && row < f.rows) {
    const uint32_t sum = f.row_sums[row];
    const bool finite = sum < kNonfiniteUp;
    f.finite[row] = finite;
    if (f.nnz != nullptr) f.nnz[row] = finite ? sum : 0;
  }
}

// The tiles that have neurons of the group whose first has rank `first`, to s.ends. By a warp.
__device__ __forceinline__ void find_ends(const Ffn& f, PlanShared& s, const Union& u, int group, int first) {
  const int lane = threadIdx.x % 32;
  int low = u.all ? group : 0, high = low;
#pragma unroll 1
  for (int tile0 = 1; !u.all && tile0 < f.tiles; tile0 += 32) {
    // of the tile's first neuron
    const int rank = tile0 + lane < f.tiles ? u.before[(tile0 + lane) * (kTile / 32)] : 1 << 30;
    low += __popc(__ballot_sync(~0u, rank <= first)), high += __popc(__ballot_sync(~0u, rank < first + kGroupColumns));
  }
  if (lane == 0) s.ends[0] = low, s.ends[1] = high;
}

// Step 7, for each group of four panels: its rows' values to `panels`. By all threads.
__device__ __forceinline__ void fill_panels(const Ffn& f, PlanShared& s, const PlanWork& work, const Union& u,
                                            const BlockRows& rows, unsigned char* panels, int group) {
  const int thread = threadIdx.x, first = group * kGroupColumns;  // a rank
  if (rows.warp == 0) find_ends(f, s, u, group, first);
  if (thread < kBlockRows) bulk_wait_read<0>();
  __syncthreads();
  for (int i = thread; i < kGroup * kPanelBytes / 16; i += kPlanThreads)
    reinterpret_cast<uint4*>(panels)[i] = make_uint4(0, 0, 0, 0);
  const bool high_nnz = s.stays_in_spill || s.values > work.rows * f.tiles * (kSlots / 3);
  bool spilled = false;
  if (!high_nnz) {
    __syncthreads();
    rows.each_tile(s.ends[0], s.ends[1] + 1 - s.ends[0], [&](int row, int tile, int word) {
      spilled |= word > kSlots;
      if (word <= kSlots)
        rows.each_slot<1>(row, tile, word, 0, [&](int column, uint16_t value) {
          const int at = u.rank_of(tile * kTile + column) - first;
          put(panels, row, static_cast<unsigned>(at) < kGroupColumns ? offset_of_column(at) : kNoOffset, value);
        });
    });
  }
  if (high_nnz || __syncthreads_or(spilled))
    rows.put_tiles(panels, s.column_offsets, s.ends, high_nnz, !s.stays_in_spill, [&](int tile) {
      if (tile > s.ends[0]) __syncthreads();
      if (thread < kOffsetTiles * kTile / 8 && tile + thread / (kTile / 8) <= s.ends[1])
        reinterpret_cast<uint4*>(s.column_offsets)[thread] = offsets_of_eight(u, tile * kTile + 8 * thread, first);
      __syncthreads();
    });
  fence_async_proxy();
  __syncthreads();
}

// Step 8: the panels leave for `hidden`; or, if values stay in `spill`, the rows that were words become rows of it.
template <typename T>
__device__ __forceinline__ void store_panels(const Ffn& f, const PlanShared& s, const PlanWork& work, const Union& u,
                                             const BlockRows& rows, unsigned char* panels, int group) {
  const int thread = threadIdx.x;
  if (s.stays_in_spill) {
    if (const int word = thread < kBlockRows ? rows.first_word(thread, group) : -1; word >= 0 && word <= kSlots)
      for (int panel = 0; panel < kGroup; ++panel)
        bulk_store(static_cast<T*>(f.spill) + rows.at(thread, group) * kTile + panel * kPanelColumns,
                   panels + panel * kPanelBytes + thread * (kPanelColumns * 2), kPanelColumns * 2);
  } else if (thread == 0) {
    bulk_store(hidden_panel(f, work.block, group * kGroup), panels,
               min(kGroup, u.panels() - group * kGroup) * kPanelBytes);
  }
  bulk_commit();
}

// Plans the CTA's block if it is settled; returns whether it is. In the kernel's own code this would cost the rest of
// the plan registers that it does not have.
inline __device__ __noinline__ bool plan_if_settled(const Ffn& f, PlanShared& s, int windows, int high_nnz_splits,
                                                    int splits, int processors) {
  PlanWork work(f, windows, high_nnz_splits, splits);
  if (!is_settled(f, work.m0)) return false;
  work.consecutive = true;
  if (work.split == 0) plan_settled(f, s, work, processors);
  return true;
}

// Shared memory: four panels [128 rows][64], in whose place a Window is first; then the union's bits and `before`.
template <typename T>
__global__ void __launch_bounds__(kPlanThreads, kPlanCtas)
    plan(const __grid_constant__ Ffn f, int windows, int high_nnz_splits, int splits, int processors) {
  extern __shared__ __align__(128) unsigned char panels[];
  __shared__ PlanShared s;
  const int thread = threadIdx.x, words = f.tiles * (kTile / 32);
  PlanWork work(f, windows, high_nnz_splits, splits);
  uint32_t* bits = reinterpret_cast<uint32_t*>(panels + kGroup * kPanelBytes);
  Union u{bits, reinterpret_cast<int*>(bits + words), words, s.size};
  const BlockRows rows{f, s.order, thread / 32, thread % 32};

  if (thread < 8) s.sparse_tiles[thread] = 0, s.up_done_tiles[thread] = 0;
  if (thread == 0) s.values = 0;
  let_next_launch();
  if (blockIdx.x == 0)  // the launches before the gate's have ended, as its CTAs have waited for them
    for (int i = thread; i < kParts * kPartWarps; i += kPlanThreads) f.part_ready[i] = 0;
  if (__syncthreads_and(plan_if_settled(f, s, windows, high_nnz_splits, splits, processors))) return;
  wait_for_launches();
  if (is_needless(f)) return;
  Window& window = *reinterpret_cast<Window*>(panels);
  work.consecutive = read_window(f, window, work.block, [&] { unite_in_place(f, s, work, u); });
  if (work.consecutive) work.splits = splits;  // rows in place fire no more than other blocks' rows
  if (work.split >= work.splits) return;
  if (!work.consecutive) sort_window(f, window);
  if (thread < kBlockRows) take_rows(f, s, work, window);
  size_union(f, s, work, window, u);

  write_list(f, s, work, u);
  if (work.split == work.writers(s.stays_in_spill) - 1 && thread == 0) {
    f.union_sizes[work.block] = s.stays_in_spill ? -s.size : s.size;
    if (f.w_up != nullptr) write_tasks(f, s, work, u, processors);
  }
  for (int group = work.split; group * kGroup < u.panels(); group += work.splits) {
    // a group is a tile there: it is in `spill` already
    if (s.stays_in_spill && !(s.sparse_tiles[group >> 5] >> (group & 31) & 1)) continue;
    fill_panels(f, s, work, u, rows, panels, group);
    store_panels<T>(f, s, work, u, rows, panels, group);
  }
  bulk_wait<0>();
}

}  // namespace twell::hopper
