// The gate product, z = x Wg^T + b, whose epilogue emits TwELL: only tiles past their slots are written dense. And the
// up products of tiles that are dense.
//
// A cluster of two CTAs takes the two row tiles of a pair and the same 256 neurons; each CTA fetches half of the
// weights' tile for both.
//
// If the tiles left after whole rounds of the clusters would leave half of them idle or more, those tiles are cut: a
// cluster takes one row tile, each CTA half of its rows, each warpgroup half of the neurons.
//
// Clusters that have no more tiles continue with up products of pairs of tiles that are dense in windows of high nnz,
// in the order in which these appear. So there is no second partial round if all tiles are dense, and nothing waits for
// the plan, which would only confirm what is known.
#pragma once

#include "hopper/many_rows/gate_epilogue.cuh"
#include "hopper/up_epilogue.cuh"

namespace twell::hopper {

// What the producer of a cluster's first CTA decides for both CTAs, one task after the other: a tile whose up product
// comes next, or -1 at the end. It decides once the loads of the task before are issued; by then all threads have read
// the decisions of kStages tasks before, as these have been multiplied.
struct Decisions {
  static constexpr int kSlots = kStages + 1;
  int tile[kSlots];
  uint64_t decided[kSlots];
  __device__ __forceinline__ void init() {
    for (uint64_t& barrier : decided) barrier_init(&barrier, 1);
  }
  __device__ __forceinline__ int wait(int i) {
    barrier_wait(&decided[i % kSlots], i / kSlots % 2);
    return tile[i % kSlots];
  }
  // By the producers' warps of both CTAs; the warp of the first CTA decides.
  __device__ __forceinline__ int make(const Ffn& f, int i, int rank, int lane) {
    if (lane == 0) barrier_expect(&decided[i % kSlots], sizeof(tile[0]));
    if (rank == 0) {
      const int next = f.continues_with_up ? DensePairs(f).take(f, lane) : -1;
      for (int cta = 0; cta < 2 && lane == 0; ++cta) send_remote(&tile[i % kSlots], &decided[i % kSlots], next, cta);
    }
    return uniform(wait(i));
  }
};

struct GateMemory {
  PackShared packs;
  Decisions decisions;
  uint64_t fetched[2];  // the gate's panels, by the warps of each warpgroup
};
static_assert(kSharedBytes + sizeof(GateMemory) <= 227 * 1024);  // all that a CTA can have

// One CTA's part in up products of dense tiles.
struct DenseTask {
  int block, tile;
  __device__ __forceinline__ DenseTask(const Ffn& f, int tile_of_pair, int rank)
      : block(tile_of_pair / f.tiles * 2 + rank), tile(tile_of_pair % f.tiles) {}
};

// By a warp.
__device__ __forceinline__ void produce_gate(const CUtensorMap& x_map, const CUtensorMap& half_x_map,
                                             const CUtensorMap& w_map, const CUtensorMap& up_map, const Ffn& f,
                                             Shared& s, Decisions& decisions, const GateTasks& tasks, int rank,
                                             int steps, int lane) {
  Ring ring;
  ring.phase = 1;  // every stage is free at first
  for (int t = tasks.first; t <= tasks.last; t += tasks.clusters) {
    const GateTask task(f, tasks, t, rank);
    load_steps(s, ring, task.cut ? half_x_map : x_map, w_map, task.m0, task.height, task.tile, rank, steps, lane);
  }
  for (int i = 0, next; (next = decisions.make(f, i, rank, lane)) >= 0; ++i) {
    const DenseTask task(f, next, rank);
    load_steps(s, ring, x_map, up_map, task.block * kTileM, kTileM, task.tile, rank, steps, lane);
  }
}

// By packing warps of the producers' warpgroup, the warp-th.
template <typename T>
__device__ __forceinline__ void pack_gate(const Ffn& f, Shared& s, GateMemory& m, const GateTasks& tasks, int rank,
                                          int warp, int lane) {
  uint32_t phase = 0;
  for (int t = tasks.first; t <= tasks.last; t += tasks.clusters, phase ^= 1) {
    barrier_wait(&s.staged[0], phase);
    const GateTask task(f, tasks, t, rank);
    if (t < tasks.last || m.decisions.wait(0) >= 0)
      pack_tile<T, kPackWarps>(s.staging, m.packs, f, task, warp, lane);
    else
      pack_tile<T, kLastPackWarps>(s.staging, m.packs, f, task, warp, lane);
    barrier_arrive(&s.drained);
  }
}

// Computes the up product of a dense tile and, from it, the tile's hidden state. Meanwhile the copy engine fetches the
// gate's values into the staging tile, and it writes the hidden state from there. drained: the phase in which the
// packing warps have left the staging tile; fetched: the phase in which the gate's values have arrived.
//
// The gate's values come from memory, and weights for the ring come after them. So the warps fetch their parts one
// after the other, into the L2 at first, and late enough that the gate's last tile is packed.
template <typename T>
__device__ __forceinline__ void consume_dense_tile(float (&d)[128], Ring& ring, const CUtensorMap& spill_map,
                                                   const Ffn& f, Shared& s, GateMemory& m, const DenseTask& task,
                                                   int steps, const Consumer& c, uint32_t drained, uint32_t fetched) {
  constexpr int kHalf = kPanelBytes / 2;  // this warpgroup's rows of a panel, half for each warp
  const int panel = task.tile * (kTileN / kPanelColumns) + c.warp, m0 = task.block * kTileM;
  unsigned char* half = s.staging + c.warp * kPanelBytes + c.group * kHalf;
  const int turn = 2 * c.warp + c.group, prefetch_at = (1 + turn) * steps / 32, fetch_at = (16 + turn) * steps / 32;
  const auto fetch = [&](int step) {
    if (c.lane == 0 && step < fetch_at) tma_prefetch_2d(&spill_map, panel * kPanelColumns, m0 + c.group * 64);
    if (c.lane == 0 && step >= fetch_at) {
      barrier_wait(&s.drained, drained);  // the gate's last tile
      bulk_wait_read<0>();                // the task before
      fence_async_proxy_global();
      barrier_expect(&m.fetched[c.group], kHalf);
      tma_load_2d(half, &spill_map, &m.fetched[c.group], panel * kPanelColumns, m0 + c.group * 64);
    }
    return step < fetch_at ? fetch_at : -1;
  };
  multiply<T, kTileN, 0, 2>(d, s, ring, steps, false, c, fetch, prefetch_at);
  barrier_wait(&m.fetched[c.group], fetched);
  const T* biases = static_cast<const T*>(f.b_up);
  const auto bias = [&](int column) {
    const int neuron = task.tile * kTileN + column;
    return neuron < f.d_ff ? static_cast<float>(biases[neuron]) : 0.f;
  };
  finish_up<T, kTileN / kPanelColumns>(
      d, s, c, biases != nullptr, bias,
      [&](int row) {
        if (m0 + row < f.rows) atomicOr(f.row_sums + m0 + row, kNonfiniteUp);
      },
      [](int) -> int* { return nullptr; });
  fence_async_proxy();
  c.sync();
  if (c.lane == 0 && task.block < f.blocks && panel < f.panels)
    bulk_store(hidden_panel(f, task.block, panel) + c.group * kHalf, half, kHalf), bulk_commit();
}

template <typename T>
__device__ __forceinline__ void consume_gate(const CUtensorMap& spill_map, const Ffn& f, Shared& s, GateMemory& m,
                                             const GateTasks& tasks, int rank, int steps, const Consumer& c) {
  Ring ring;
  uint32_t phase = 1;  // the staging tile is free at first
  float d[128];
  for (int t = tasks.first; t <= tasks.last; t += tasks.clusters, phase ^= 1) {
    const GateTask task(f, tasks, t, rank);
    const auto run = [&]<int kN>(const Consumer& part) {
      multiply<T, kN, 0, 2>(d, s, ring, steps, false, part, [] {});
      barrier_wait(&s.drained, phase);
      stage_gate<T, kN>(d, s, f, task, part);
    };
    if (task.cut)
      run.template operator()<kTileN / 2>({c.group, c.warp, c.lane, 0, c.group * (kTileN / 2)});
    else
      run.template operator()<kTileN>(c);
    fence_async_proxy();  // the copy engine writes rows past their slots
    barrier_arrive(&s.staged[0]);
  }
  int next = uniform(m.decisions.wait(0));
  if (next < 0) {
    if (tasks.first > tasks.last) return;
    barrier_wait(&s.staged[0], phase);
    pack_tile<T, kLastPackWarps>(s.staging, m.packs, f, GateTask(f, tasks, tasks.last, rank),
                                 kPackWarps + c.group * 4 + c.warp, c.lane);
    return;
  }
  uint32_t fetched = 0;
#pragma unroll 1
  for (int i = 1; next >= 0; next = uniform(m.decisions.wait(i++)), fetched ^= 1) {
    const DenseTask task(f, next, rank);
    consume_dense_tile<T>(d, ring, spill_map, f, s, m, task, steps, c, phase, fetched);
  }
  if (c.lane == 0) bulk_wait<0>();
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    gate(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap half_x_map,
         const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap up_map,
         const __grid_constant__ CUtensorMap spill_map, const Ffn f) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *in_register(reinterpret_cast<Shared*>(raw));
  __shared__ GateMemory memory;
  const int group = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32,
            rank = cluster_rank();

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], 2 * kConsumerWarps);
    barrier_init(&s.staged[0], kConsumers), barrier_init(&s.drained, kPackers);
    barrier_init(&memory.packs.joined, 1),
        barrier_init(&memory.packs.fired_ready, PackShared::kFiredWords * kLastPackWarps), memory.decisions.init();
    for (uint64_t& barrier : memory.fetched) barrier_init(&barrier, kConsumerWarps / 2);
    fence_barrier_init();
  }
  wait_for_launches();
  let_next_launch();  // only now: before its own wait, the plan reads counters that the launch before this one zeroes
  if (is_needless(f)) return;
  cluster_sync();

  const GateTasks tasks(f);
  const int steps = (f.d_model + kTileK - 1) / kTileK;
  if (group == 2) {
    registers_down<kProducerRegisters>();
    if (warp > 0)
      pack_gate<T>(f, s, memory, tasks, rank, warp - 1, lane);
    else
      produce_gate(x_map, half_x_map, w_map, up_map, f, s, memory.decisions, tasks, rank, steps, lane);
  } else {
    registers_up<kConsumerRegisters>();
    consume_gate<T>(spill_map, f, s, memory, tasks, rank, steps, {group, warp, lane});
  }
  cluster_sync();  // no CTA ends while the other may still write to it
}

}  // namespace twell::hopper
