// The gate and up products of kRows rows, or of the first `taken` of them, and kN neurons for a CTA. A consumer
// warpgroup takes half of the rows, 64 at a time. The CTAs of a pair have neighbouring neurons and the same rows, and
// each fetches half of the rows for both.
#pragma once

#include "hopper/mid_rows/epilogues.cuh"

namespace twell::hopper {

// The tensor maps of `tiled_gate_up`. Those named `last_` have smaller boxes, for the tiles at the matrices' ends.
struct TiledMaps {
  const CUtensorMap &x, &last_x, &gate, &up, &last_gate, &last_up, &h;
};

// The tile of a CTA: its neurons from `first` on, of which `real` exist, and its rows from m0 on, of which real_rows
// exist.
struct TiledTask {
  int rank, steps, tile, first, m0, half, real, real_rows;
  bool full_half;  // all rows of the half that this CTA fetches exist
  __device__ __forceinline__ TiledTask(const Ffn& f, int neurons, int taken)
      : rank(cluster_rank()),
        steps((f.d_model + kTileK - 1) / kTileK),
        tile(tile_column()),
        first(tile * neurons),
        m0(blockIdx.y * taken),
        half(taken / kTiledPair),
        real(max(min(neurons, f.d_ff - first), 0)),
        real_rows(min(taken, f.rows - m0)),
        full_half(real_rows >= (rank + 1) * half) {}
};

// Prepares the barriers of both products' stages and of the pair, and clears the marks. By one thread.
template <int kN, int kRows>
__device__ __forceinline__ void begin_tiled(TiledShared<kN, kRows>& s) {
#pragma unroll 1
  for (int i = 0; i < kTiledStages; ++i) {
    for (int j = 0; j < 2; ++j)
      barrier_init(&s.full[j][i], 1), barrier_init(&s.empty[j][i], kTiledPair * kConsumerWarps);
    barrier_init(&s.gathered[i], kProducerWarps - 1);
  }
  barrier_init(&s.decided, 1), barrier_init(&s.ready, 1), barrier_init(&s.left, kTiledPair),
      barrier_init(&s.sure, kTiledPair);
  fence_barrier_init();
  barrier_expect(&s.decided, sizeof(s.other));
  barrier_expect_more(&s.sure, sizeof(s.votes));
  for (auto& words : s.fires)
    for (uint32_t& word : words) word = 0;
  for (uint32_t& word : s.broken) word = 0;
}

// Returns the ring of the up product of `width` neurons, at its start.
template <int kN, int kRows>
__device__ __forceinline__ Stages tiled_up_ring(unsigned char* base, TiledShared<kN, kRows>& s, int width,
                                                bool consumes) {
  using Where = TiledRing<kN, kRows>;
  unsigned char* begin = base + Where::begin(width);
  return Stages{begin, s.full[1], s.empty[1], Where::stages(width), Where::stage(width), !consumes};
}

// Fills the stages of the gate product and, once the consumers have listed what fired, those of the up product. By the
// producers.
template <typename T, int kN, int kRows>
__device__ __forceinline__ void produce_tiled(Stages& ring, unsigned char* base, TiledShared<kN, kRows>& s,
                                              const TiledMaps& maps, const Ffn& f, const TiledTask& task, bool dense) {
  using Space = TiledShared<kN, kRows>;
  using Where = TiledRing<kN, kRows>;
  constexpr int kRowBytes = kRows * kTileK * 2;
  const int thread = threadIdx.x, turn = thread / 32 - kConsumerWarps, steps = task.steps, first = task.first;
  const bool last = task.real < kN;
  const bool requests = thread % 32 == 0;  // whether this thread issues the copy engine's copies
  const auto load = [&](const CUtensorMap& weights, int neurons) {
    return TiledLoad{task.full_half ? maps.x : maps.last_x,
                     weights,
                     task.real_rows * kTileK * 2,
                     neurons * kTileK * 2,
                     first,
                     kRowBytes,
                     task.half};
  };
  if (requests)
    load_tiled(ring, load(last ? maps.last_gate : maps.gate, task.real), steps, 0, steps, turn, kProducerWarps,
               [](int) {});
  const auto load_up = [&] { return load(last ? maps.last_up : maps.up, task.real); };
  Stages ahead = tiled_up_ring(base, s, kN, false);
  // Stages of the up product that are fetched while what fired is listed, if all weights are surely needed.
  int begun = 0;
  if (requests && f.w_up != nullptr) {
    barrier_wait(&s.sure, 0);
    if (!dense && (s.votes[0] || s.votes[1])) begun = min(Where::kEarly, steps);
    load_tiled(ahead, load_up(), steps, 0, begun, turn, kProducerWarps, [](int) {});
  }
  __syncthreads();  // what fired is listed
  // racecheck miscounts the threads that wait here, since the consumers have met among themselves meanwhile
  __syncthreads();
  const int count = uniform(s.count), width = uniform(s.width);
  if (f.w_up != nullptr && width > 0) {
    Stages again = tiled_up_ring(base, s, width, false);
    if (thread == kConsumers) barrier_arrive_remote(&s.ready, task.rank ^ 1);
    if (requests) barrier_wait(&s.ready, 0);  // the other CTA's ring, which gets the rows too
    __syncwarp();
    if (width == kN) {
      if (requests) load_all_weights<kN, kRows>(ahead, s, load_up(), maps.h, steps, begun, turn);
    } else if (turn == 0) {
      if (requests) load_tiled(again, load(maps.up, 0), steps, 0, steps, 0, 1, [](int) {});
    } else {
      const T* up = static_cast<const T*>(f.w_up);
      gather_tiled<T, Space::kMost, Where::kLate>(again, s.gathered, up, s.list, count, first, steps, f.d_model,
                                                  kRowBytes);
    }
  }
}

// Returns the thread's position in the p-th 64 rows of its warpgroup. It is computed at each use, since there are no
// registers to keep it in.
template <int kPieces>
__device__ __forceinline__ Consumer tiled_piece(int p) {
  int self;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(self));
  return Consumer{self / 128 * kPieces + p, self / 32 % 4, self % 32};
}

// Moves the last 64 rows' sums to the first ones, so that the code of an epilogue exists once.
template <int kPieces, int kSize>
__device__ __forceinline__ void turn_pieces(float (&d)[kPieces][kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) d[0][i] = d[kPieces - 1][i];
}

// Computes the gate product and its values, in panels from `held` on, and lists what fired. By the consumers.
template <typename T, int kN, int kRows, int kPieces>
__device__ __forceinline__ void consume_tiled_gate(float (&d)[kPieces][kN / 2], Stages& ring, unsigned char* base,
                                                   TiledShared<kN, kRows>& s, const Ffn& f, const TiledTask& task,
                                                   int block, bool dense) {
  using Space = TiledShared<kN, kRows>;
  using Where = TiledRing<kN, kRows>;
  constexpr int kRowBytes = kRows * kTileK * 2;
  unsigned char* held = base + Where::kHeld;
  const int thread = threadIdx.x, group = thread / 128, lane = thread % 32, first = task.first,
            real_rows = task.real_rows;
  if (task.real < kN) clear_rest<kN, kRows>(base, kRows + task.real, kRows + kN);
  if (real_rows < kRows) clear_rest<kN, kRows>(base, real_rows, kRows);
  begin_sums<T, kN>(d, s.biases, f.b_gate, f.d_ff, real_rows - tiled_piece<kPieces>(0).row(),
                    [&](int place) { return first + place; });
  const uint32_t empty = remote_address(s.empty[0], lane % kTiledPair);
  multiply_pieces<T, kN>(
      d, ring, task.steps, group * (kRowBytes / 2), kRowBytes,
      [&](int stage, uint32_t phase) { barrier_wait(&s.full[0][stage], phase); }, lane < kTiledPair,
      [&](int stage) { barrier_arrive_remote(empty + 8 * stage); });
  named_sync<kConsumers>(3);  // the ring has been read; the values are written there
  if (thread < 32 && f.w_up != nullptr) {
    const bool surely = surely_all<kN, Space::kMost>(d);
    if (lane < kTiledPair)
      send_remote(&s.votes[task.rank], &s.sure, surely, lane), barrier_arrive_remote(&s.sure, lane);
  }
#pragma unroll 1
  for (int p = 0; p < kPieces; ++p, turn_pieces(d)) {
    unsigned char* panel = held + (group * kPieces + p) * Where::kPanel;
    const Consumer piece = tiled_piece<kPieces>(p);
    const GateMarks<kN> marks = stage_tiled_gate<T, kN>(d[0], f.w_up == nullptr, piece, panel);
    mark_tiled_gate(marks, s, f, piece, first, real_rows, TiledMarks(f, block, tile_columns()).counts_of(task.tile));
  }
  for (int p = 0; dense && p < kPieces; ++p)
    spill_tiled_gate<T, kN>(held + (group * kPieces + p) * Where::kPanel, reinterpret_cast<uint16_t*>(base), f,
                            tiled_piece<kPieces>(p), first, task.m0, real_rows);
  named_sync<kConsumers>(3);
  list_fired<kN, kRows>(s, f, first, base);
  fence_async_proxy();  // the copy engine reads the values, and writes where they were
}

// Prefetches the listed neurons' rows of `weights`, [d_ff][d_model], into the L2. By the consumers.
template <typename T>
__device__ __forceinline__ void prefetch_listed(const Ffn& f, const void* weights, const uint16_t* list, int count,
                                                int first) {
  const int lines = (f.d_model * 2 + 127) / 128;
#pragma unroll 1
  for (int i = threadIdx.x; i < count * lines; i += kConsumers)
    prefetch_line(static_cast<const T*>(weights) + static_cast<int64_t>(first + list[i / lines]) * f.d_model +
                  i % lines * 64);
}

// Sends a panel of all neurons, the p-th of this warpgroup, to `hidden`. By a consumer warpgroup.
template <int kPieces>
__device__ __forceinline__ void leave_panel(const CUtensorMap& h_map, const unsigned char* panel, int p, int first,
                                            int block) {
  const int thread = threadIdx.x, group = thread / 128;
  fence_async_proxy();
  named_sync<128>(1 + tiled_piece<kPieces>(0).group / kPieces);
  if (thread % 128 > 0) return;
  tma_store_3d(&h_map, panel, 64 * ((group * kPieces + p) % 2), first, block);
  bulk_commit();
}

// Computes the up product of kUp neurons, those of the list or all kN, and writes their hidden state in place of the
// gate's values in `panels`. Panels of all neurons are sent to `hidden`.
template <typename T, int kUp, int kN, int kRows, int kPieces>
__device__ __forceinline__ void consume_tiled_up(float (&d)[kPieces][kN / 2], unsigned char* base,
                                                 unsigned char*& panels, TiledShared<kN, kRows>& s,
                                                 const CUtensorMap& h_map, const Ffn& f, const TiledTask& task,
                                                 int block, int count) {
  using Where = TiledRing<kN, kRows>;
  constexpr int kRowBytes = kRows * kTileK * 2;
  const int thread = threadIdx.x, group = thread / 128, lane = thread % 32, first = task.first,
            real_rows = task.real_rows;
  Stages again = tiled_up_ring(base, s, kUp, true);
  begin_sums<T, kUp>(d, s.biases, f.b_up, f.d_ff, real_rows - tiled_piece<kPieces>(0).row(), [&](int place) {
    return kUp == kN ? first + place : place < count ? first + s.list[place] : f.d_ff;
  });
  const uint32_t empty = remote_address(s.empty[1], lane % kTiledPair);
  multiply_pieces<T, kUp>(
      d, again, task.steps, group * (kRowBytes / 2), kRowBytes,
      [&](int stage, uint32_t phase) {
        barrier_wait(&s.full[1][stage], phase);
        if constexpr (kUp < kN) barrier_wait(&s.gathered[stage], phase);
      },
      lane < kTiledPair, [&](int stage) { barrier_arrive_remote(empty + 8 * stage); }, kUp == kN ? Where::kFurther : 0);
  // The values come back, this warpgroup's as the first or second stage from here.
  if constexpr (kUp == kN && Where::kLeaves) {
    if (group == 1) again.next();
    barrier_wait(&again.full[again.at], again.phase);
    panels = again.here();
  }
#pragma unroll 1
  for (int p = 0; p < kPieces; ++p, turn_pieces(d)) {
    finish_tiled_up<T, kUp, kN, kRows>(d[0], s, tiled_piece<kPieces>(p), real_rows, panels + p * (kUp * 128),
                                       kUpRelu && f.nnz_used != nullptr ? f.nnz_used + task.m0 : nullptr);
    if constexpr (kUp == kN) leave_panel<kPieces>(h_map, panels + p * Where::kPanel, p, first, block);
  }
}

// Writes the listed neurons' hidden state from `panels`, of `width` neurons each. By a consumer warpgroup, for its own
// rows.
template <typename T, int kPieces>
__device__ __forceinline__ void store_listed(unsigned char* panels, const uint16_t* list, const Ffn& f, int block,
                                             int first, int count, int width) {
  constexpr int kChunks = 8 * kPieces;
  const int thread = threadIdx.x, group = thread / 128;
#pragma unroll 1
  for (int i = thread % 128; i < count * kChunks; i += 128) {
    const int place = i / kChunks, chunk = i % kChunks;
    reinterpret_cast<uint4*>(hidden_of<T>(f, block, first + list[place]))[(kPieces == 1 ? 8 * group : 0) + chunk] =
        *reinterpret_cast<const uint4*>(panel_chunk(panels + chunk / 8 * (width * 128), place, chunk));
  }
}

// Computes the gate product, then the up product of what fired, and writes the hidden state and the tile's marks. By
// the consumers.
template <typename T, int kN, int kRows>
__device__ __forceinline__ void consume_tiled(Stages& ring, unsigned char* base, TiledShared<kN, kRows>& s,
                                              const CUtensorMap& h_map, const Ffn& f, const TiledTask& task,
                                              bool dense) {
  using Space = TiledShared<kN, kRows>;
  using Where = TiledRing<kN, kRows>;
  constexpr int kPieces = kRows / kBlockRows, kOwnWords = kPieces * 2;
  const int thread = threadIdx.x, group = thread / 128, first = task.first;
  const int block = blockIdx.y * Space::kBlocks + group * kPieces / 2;
  float d[kPieces][kN / 2];
  consume_tiled_gate<T, kN, kRows>(d, ring, base, s, f, task, block, dense);
  __syncthreads();
  __syncthreads();  // the producers make the same one

  const int count = uniform(s.count), width = uniform(s.width);
  const bool has_up = f.w_up != nullptr && width > 0, all_weights = width == kN;
  if (!all_weights) {  // prefetching all at once would delay what the copy engine reads
    if (has_up) prefetch_listed<T>(f, f.w_up, s.list, count, first);
    prefetch_listed<T>(f, f.w_down, s.list, count, first);
  }
  unsigned char* panels = (all_weights ? base + Where::kHeld : base) + group * kPieces * (width * 128);
  const auto run = [&]<int kUp>() {
    consume_tiled_up<T, kUp, kN, kRows>(d, base, panels, s, h_map, f, task, block, count);
  };
  if (!has_up) {
    for (int p = 0; all_weights && p < kPieces; ++p)
      leave_panel<kPieces>(h_map, panels + p * Where::kPanel, p, first, block);
  } else if (all_weights) {
    run.template operator()<kN>();
  } else {
    by_width<Space>(width, run);
  }
  named_sync<128>(1 + tiled_piece<kPieces>(0).group / kPieces);
  if (!all_weights && block < f.blocks) store_listed<T, kPieces>(panels, s.list, f, block, first, count, width);
  if (thread % 128 < kOwnWords && block < f.blocks) {
    const int word = group * kOwnWords + thread % 128;
    TiledMarks(f, block, tile_columns()).broken[task.tile * (kBlockRows / 32) + word % (kBlockRows / 32)] =
        s.broken[word];
  }
  if (all_weights && thread % 128 == 0) bulk_wait_read<0>();
}

template <typename T, int kN, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    tiled_gate_up(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap last_x_map,
                  const __grid_constant__ CUtensorMap gate_map, const __grid_constant__ CUtensorMap up_map,
                  const __grid_constant__ CUtensorMap last_gate_map, const __grid_constant__ CUtensorMap last_up_map,
                  const __grid_constant__ CUtensorMap h_map, const Ffn f, int taken, bool dense) {
  using Space = TiledShared<kN, kRows>;
  using Where = TiledRing<kN, kRows>;
  extern __shared__ __align__(1024) unsigned char raw[];
  unsigned char *start = in_register(raw), *base = start + Where::kBegin;
  Space& s = *reinterpret_cast<Space*>(start);
  const int thread = threadIdx.x;
  const TiledMaps maps{x_map, last_x_map, gate_map, up_map, last_gate_map, last_up_map, h_map};
  const TiledTask task(f, kN, taken);
  const bool consumes = thread < kConsumers, last = task.real < kN;
  if (thread == 0) begin_tiled(s);
  if (thread == 32) {
    prefetch_map(task.full_half ? &x_map : &last_x_map);
    prefetch_map(last ? &last_gate_map : &gate_map), prefetch_map(last ? &last_up_map : &up_map);
  }
  cluster_sync();
  let_next_launch();
  wait_for_launches();

  Stages ring{base, s.full[0], s.empty[0], Where::kGateStages, Where::stage(kN), !consumes};
  if (!consumes) {
    registers_down<Where::kProducerRegisters>();
    produce_tiled<T>(ring, base, s, maps, f, task, dense);
  } else {
    registers_up<Where::kConsumerRegisters>();
    consume_tiled<T>(ring, base, s, h_map, f, task, dense);
  }
}

}  // namespace twell::hopper
