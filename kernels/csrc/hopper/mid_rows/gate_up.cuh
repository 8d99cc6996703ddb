// The gate and up products of kRows rows, or as many of them as `taken`, and kN neurons to a CTA. A consumer warpgroup has 64 of them at a time
// out of its half. The CTAs of a pair take neighbouring neurons of the same rows, of which each brings half to both.
#pragma once

#include "hopper/mid_rows/epilogues.cuh"

namespace twell::hopper {

template <typename T, int kN, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    tiled_gate_up(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap last_x_map,
                const __grid_constant__ CUtensorMap gate_map, const __grid_constant__ CUtensorMap up_map,
                const __grid_constant__ CUtensorMap last_gate_map, const __grid_constant__ CUtensorMap last_up_map,
                const __grid_constant__ CUtensorMap h_map, const Ffn f, int taken, bool dense) {
  using Space = TiledShared<kN, kRows>;
  using Where = TiledRing<kN, kRows>;
  constexpr int kPieces = kRows / kBlockRows, kRowBytes = kRows * kTileK * 2;
  extern __shared__ __align__(1024) unsigned char raw[];
  unsigned char *start = in_register(raw), *base = start + Where::kBegin, *held = base + Where::kHeld;
  Space& s = *reinterpret_cast<Space*>(start);
  const int thread = threadIdx.x, rank = cluster_rank(), steps = (f.d_model + kTileK - 1) / kTileK;
  const int tile = tile_column(), first = tile * kN, m0 = blockIdx.y * taken, half = taken / kTiledPair;
  const int real = max(min(kN, f.d_ff - first), 0), real_rows = min(taken, f.rows - m0);
  const bool consumes = thread < kConsumers, last = real < kN, last_rows = real_rows < kRows;
  const bool full_half = real_rows >= (rank + 1) * half;
  if (thread == 0) {
#pragma unroll 1
    for (int i = 0; i < kTiledStages; ++i) {
      for (int j = 0; j < 2; ++j) barrier_init(&s.full[j][i], 1), barrier_init(&s.empty[j][i], kTiledPair * kConsumerWarps);
      barrier_init(&s.gathered[i], kProducerWarps - 1);
    }
    barrier_init(&s.decided, 1), barrier_init(&s.ready, 1), barrier_init(&s.left, kTiledPair), barrier_init(&s.sure, kTiledPair);
    fence_barrier_init();
    barrier_expect(&s.decided, sizeof(s.other));
    barrier_expect_more(&s.sure, sizeof(s.votes));
    for (auto& words : s.fires)
      for (uint32_t& word : words) word = 0;
    for (uint32_t& word : s.broken) word = 0;
  }
  if (thread == 32) {
    prefetch_map(full_half ? &x_map : &last_x_map);
    prefetch_map(last ? &last_gate_map : &gate_map), prefetch_map(last ? &last_up_map : &up_map);
  }
  cluster_sync();
  let_next_launch();
  wait_for_launches();

  Stages ring{base, s.full[0], s.empty[0], Where::kGateStages, Where::stage(kN), !consumes};
  const auto up_ring = [&](int width) {
    return Stages{base + Where::begin(width), s.full[1], s.empty[1], Where::stages(width), Where::stage(width), !consumes};
  };
  if (!consumes) {
    registers_down<Where::kProducerRegisters>();
    const int turn = thread / 32 - kConsumerWarps;
    const bool requests = thread % 32 == 0;  // for what the copy engine brings
    const auto load = [&](const CUtensorMap& weights, int neurons) {
      return TiledLoad{full_half ? x_map : last_x_map, weights, real_rows * kTileK * 2, neurons * kTileK * 2, first, kRowBytes, half};
    };
    if (requests) load_tiled(ring, load(last ? last_gate_map : gate_map, real), steps, 0, steps, turn, kProducerWarps, [](int) {});
    const auto load_up = [&] { return load(last ? last_up_map : up_map, real); };
    Stages ahead = up_ring(kN);
    int begun = 0;  // of the up product's stages: on their way while what fired is listed, where all weights are surely wanted
    if (requests && f.w_up != nullptr) {
      barrier_wait(&s.sure, 0);
      if (!dense && (s.votes[0] || s.votes[1])) begun = min(Where::kEarly, steps);
      load_tiled(ahead, load_up(), steps, 0, begun, turn, kProducerWarps, [](int) {});
    }
    __syncthreads();  // what fired is listed
    __syncthreads();  // racecheck counts who waits here amiss, as the consumers have met among themselves meanwhile
    const int count = uniform(s.count), width = uniform(s.width);
    if (f.w_up != nullptr && width > 0) {
      Stages again = up_ring(width);
      if (thread == kConsumers) barrier_arrive_remote(&s.ready, rank ^ 1);
      if (requests) barrier_wait(&s.ready, 0);  // the other's ring, where the rows go too
      __syncwarp();
      if (width == kN) {
        if (requests) load_all_weights<kN, kRows>(ahead, s, load_up(), h_map, steps, begun, turn);
      } else if (turn == 0) {
        if (requests) load_tiled(again, load(up_map, 0), steps, 0, steps, 0, 1, [](int) {});
      } else {
        const T* up = static_cast<const T*>(f.w_up);
        gather_tiled<T, Space::kMost, Where::kLate>(again, s.gathered, up, s.list, count, first, steps, f.d_model, kRowBytes);
      }
    }
  } else {
    registers_up<Where::kConsumerRegisters>();
    const int group = thread / 128, lane = thread % 32;
    const auto piece = [&](int p) {  // worked out anew each time: there are no registers to keep it in
      int self;
      asm volatile("mov.u32 %0, %%tid.x;" : "=r"(self));
      return Consumer{self / 128 * kPieces + p, self / 32 % 4, self % 32};
    };
    const int block = blockIdx.y * Space::kBlocks + group * kPieces / 2, a_at = group * (kRowBytes / 2);
    const auto marks = [&] { return TiledMarks(f, block, tile_columns()); };
    if (last) clear_rest<kN, kRows>(base, kRows + real, kRows + kN);
    if (last_rows) clear_rest<kN, kRows>(base, real_rows, kRows);
    float d[kPieces][kN / 2];
    const auto rows_left = [&] { return real_rows - piece(0).row(); };
    begin_sums<T, kN>(d, s.biases, f.b_gate, f.d_ff, rows_left(), [&](int place) { return first + place; });
    const uint32_t empty = remote_address(s.empty[0], lane % kTiledPair);
    multiply_pieces<T, kN>(d, ring, steps, a_at, kRowBytes, [&](int stage, uint32_t phase) { barrier_wait(&s.full[0][stage], phase); },
                           lane < kTiledPair, [&](int stage) { barrier_arrive_remote(empty + 8 * stage); });
    named_sync<kConsumers>(3);  // the ring is read; the values go there
    if (thread < 32 && f.w_up != nullptr) {
      const bool surely = surely_all<kN, Space::kMost>(d);
      if (lane < kTiledPair) send_remote(&s.votes[rank], &s.sure, surely, lane), barrier_arrive_remote(&s.sure, lane);
    }
    const auto turn = [&] {  // one piece after the other is in the first sums, so that their code is there once
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) d[0][i] = d[kPieces - 1][i];
    };
#pragma unroll 1
    for (int p = 0; p < kPieces; ++p, turn()) {
      unsigned char* panel = held + (group * kPieces + p) * Where::kPanel;
      finish_tiled_gate<T, kN, kRows>(d[0], s, f, piece(p), first, real_rows, panel, marks().counts_of(tile));
    }
    for (int p = 0; dense && p < kPieces; ++p)
      spill_tiled_gate<T, kN>(held + (group * kPieces + p) * Where::kPanel, reinterpret_cast<uint16_t*>(base), f, piece(p), first, m0, real_rows);
    named_sync<kConsumers>(3);
    list_fired<kN, kRows>(s, f, first, base);
    fence_async_proxy();  // the copy engine reads the values, and writes where they were
    __syncthreads();
    __syncthreads();  // as the producers have it

    const int count = uniform(s.count), width = uniform(s.width);
    const bool has_up = f.w_up != nullptr && width > 0, all_weights = width == kN;
    const auto fetch = [&](const void* weights) {  // those of the list, into the L2
      const int lines = (f.d_model * 2 + 127) / 128;
#pragma unroll 1
      for (int i = thread; i < count * lines; i += kConsumers)
        prefetch_line(static_cast<const T*>(weights) + static_cast<int64_t>(first + s.list[i / lines]) * f.d_model + i % lines * 64);
    };
    if (!all_weights) {  // all of it at once would hold up what the copy engine reads
      if (has_up) fetch(f.w_up);
      fetch(f.w_down);
    }
    unsigned char* panels = (all_weights ? held : base) + group * kPieces * (width * 128);
    const auto leave = [&](int p) {
      fence_async_proxy();
      named_sync<128>(1 + piece(0).group / kPieces);
      if (thread % 128 > 0) return;
      tma_store_3d(&h_map, panels + p * Where::kPanel, 64 * ((group * kPieces + p) % 2), first, block);
      bulk_commit();
    };
    const auto run = [&]<int kUp>() {
      Stages again = up_ring(kUp);
      begin_sums<T, kUp>(d, s.biases, f.b_up, f.d_ff, rows_left(), [&](int place) {
        return kUp == kN ? first + place : place < count ? first + s.list[place] : f.d_ff;
      });
      const uint32_t empty = remote_address(s.empty[1], lane % kTiledPair);
      multiply_pieces<T, kUp>(d, again, steps, a_at, kRowBytes,
                              [&](int stage, uint32_t phase) {
                                barrier_wait(&s.full[1][stage], phase);
                                if constexpr (kUp < kN) barrier_wait(&s.gathered[stage], phase);
                              },
                              lane < kTiledPair, [&](int stage) { barrier_arrive_remote(empty + 8 * stage); }, kUp == kN ? Where::kFurther : 0);
      if constexpr (kUp == kN && Where::kLeaves) {  // the values come back, this warpgroup's as the first or second stage from here
        if (group == 1) again.next();
        barrier_wait(&again.full[again.at], again.phase);
        panels = again.here();
      }
#pragma unroll 1
      for (int p = 0; p < kPieces; ++p, turn()) {
        finish_tiled_up<T, kUp, kN, kRows>(d[0], s, piece(p), real_rows, panels + p * (kUp * 128));
        if constexpr (kUp == kN) leave(p);
      }
    };
    if (!has_up) {
      for (int p = 0; all_weights && p < kPieces; ++p) leave(p);
    } else if (all_weights) {
      run.template operator()<kN>();
    } else {
      by_width<Space>(width, run);
    }
    named_sync<128>(1 + piece(0).group / kPieces);
    if (!all_weights && block < f.blocks) {
      constexpr int kChunks = 8 * kPieces;
#pragma unroll 1
      for (int i = thread % 128; i < count * kChunks; i += 128) {
        const int place = i / kChunks, chunk = i % kChunks;
        reinterpret_cast<uint4*>(hidden_of<T>(f, block, first + s.list[place]))[(kPieces == 1 ? 8 * group : 0) + chunk] =
            *reinterpret_cast<const uint4*>(panel_chunk(panels + chunk / 8 * (width * 128), place, chunk));
      }
    }
    constexpr int kOwnWords = kPieces * 2;
    if (thread % 128 < kOwnWords && block < f.blocks) {
      const int word = group * kOwnWords + thread % 128;
      marks().broken[tile * (kBlockRows / 32) + word % (kBlockRows / 32)] = s.broken[word];
    }
    if (all_weights && thread % 128 == 0) bulk_wait_read<0>();
  }
}

}  // namespace twell::hopper
