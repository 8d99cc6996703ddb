// The gate product of many rows of a plain FFN, in place of `tiled_gate_up`: there, what surrounds the products of a
// CTA takes as long as they do where inputs are few. These CTAs stay, and take one tile of 128 rows x 256 neurons after
// the other: the stages of the next tile are filled during a tile's epilogue. A cluster of two has the same neurons of
// two blocks, and each CTA fetches half of the weights for both.
//
// A plain FFN's hidden state is the gate's values. So a tile goes to `hidden` as it is, from the staging tile, while
// the next one is multiplied.
#pragma once

#include "hopper/mid_rows/epilogues.cuh"

namespace twell::hopper {

// What a tile's epilogue marks, as in TiledShared, but what fires by warps, which then need no atomics. There are two,
// for tiles in turns, so that one is read while the next tile's epilogue begins.
struct PersistentMarks {
  static constexpr int kWords = kTileN / 32;
  uint32_t fires[kConsumerWarps][kWords], broken[kTileM / 32];

  __device__ __forceinline__ void mark(const Consumer& c, uint32_t word) {
    if (c.lane < kWords) fires[c.group * 4 + c.warp][c.lane] = word;
  }
  __device__ __forceinline__ uint32_t fired(int word) const {
    uint32_t all = 0;
    for (const auto& of_warp : fires) all |= of_warp[word];
    return all;
  }
};

// Registers of a thread: the producers do no more than request copies, and the epilogue needs many.
constexpr int kGateProducerRegisters = 40, kGateConsumerRegisters = 232;

// The tiles of this cluster: one in `clusters` from `first` on.
struct PersistentTasks {
  int clusters, first;
  PairTiles order;
  __device__ __forceinline__ PersistentTasks(const Ffn& f, int tiles)
      : clusters(gridDim.x / 2), first(blockIdx.x / 2), order(f, tiles) {}
  __device__ __forceinline__ int total() const { return order.count(); }
  __device__ __forceinline__ int block(int task, int rank) const { return order[task].pair * 2 + rank; }
  __device__ __forceinline__ int tile(int task) const { return order[task].tile; }
};

// Adds the biases of the tile's neurons, from the first-th on, to the sums of rows that exist.
template <typename T>
__device__ __forceinline__ void add_biases(float (&d)[kTileN / 2], const T* biases, int d_ff, int first,
                                           const Consumer& c, int rows) {
  const bool there[2] = {c.row() < rows, c.row() + 8 < rows};
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int neuron = first + 8 * j + 2 * (c.lane & 3) + e;
      const float bias = neuron < d_ff ? static_cast<float>(biases[neuron]) : 0.f;
#pragma unroll
      for (int h = 0; h < 2; ++h) d[4 * j + 2 * h + e] += there[h] ? bias : 0.f;
    }
}

// Sends a tile's values from its panels to `hidden`, and writes its marks. By the consumers.
__device__ __forceinline__ void finish_persistent(const CUtensorMap& h_map, const Ffn& f,
                                                  const GateMarks<kTileN>& fired, PersistentMarks& marks,
                                                  const PersistentTasks& tasks, int task, int rank,
                                                  const unsigned char* panel, const Consumer& c) {
  const int block = tasks.block(task, rank), tile = tasks.tile(task), first = tile * kTileN;
  const TiledMarks to(f, block, tasks.order.tiles);
  fence_async_proxy();  // of the panel; before the counts are on their way, for which it would wait
  mark_tiled_gate(fired, marks, f, c, first, f.rows - block * kTileM, to.counts_of(tile));
  named_sync<kConsumers>(3);
  if (block >= f.blocks) return;  // the last pair's second, of which no row exists
  if (c.leads()) tma_store_3d(&h_map, panel, 64 * c.group, first, block), bulk_commit();
  const int words = f.panels * (kPanelColumns / 32), word = threadIdx.x;  // 32 neurons each
  if (word < PersistentMarks::kWords) {
    if (first / 32 + word < words) reinterpret_cast<uint32_t*>(to.fired)[first / 32 + word] = marks.fired(word);
  } else if (const int quarter = word - PersistentMarks::kWords; quarter < kTileM / 32) {
    to.broken[tile * (kTileM / 32) + quarter] = marks.broken[quarter];
    marks.broken[quarter] = 0;
  }
}

// By the consumers.
template <typename T>
__device__ __forceinline__ void consume_persistent(const CUtensorMap& h_map, const Ffn& f, Shared& s,
                                                   PersistentMarks (&marks)[2], const PersistentTasks& tasks, int rank,
                                                   int steps, const Consumer& c) {
  Ring ring;
  float d[kTileN / 2];
  unsigned char* panel = s.staging + c.group * (kTileN * 128);
  int turn = 0;
  for (int task = tasks.first; task < tasks.total(); task += tasks.clusters, turn ^= 1) {
    multiply<T, kTileN, 0, 2>(d, s, ring, steps, false, c, [] {});
    if (const T* biases = static_cast<const T*>(f.b_gate))
      add_biases<T>(d, biases, f.d_ff, tasks.tile(task) * kTileN, c, f.rows - tasks.block(task, rank) * kTileM);
    if (c.leads()) bulk_wait_read<0>();  // the panel of the tile before has left
    c.sync();
    const GateMarks<kTileN> fired = stage_tiled_gate<T, kTileN>(d, true, c, panel);
    finish_persistent(h_map, f, fired, marks[turn], tasks, task, rank, panel, c);
  }
  if (c.leads()) bulk_wait<0>();
}

// tiles: of neurons
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    persistent_gate(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                    const __grid_constant__ CUtensorMap h_map, const Ffn f, int tiles) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *in_register(reinterpret_cast<Shared*>(raw));
  __shared__ PersistentMarks marks[2];
  const int group = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32,
            rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], 2 * kConsumerWarps);
    fence_barrier_init();
  }
  if (threadIdx.x < 2 * kTileM / 32) marks[threadIdx.x % 2].broken[threadIdx.x / 2] = 0;
  let_next_launch();
  wait_for_launches();
  cluster_sync();

  const PersistentTasks tasks(f, tiles);
  const int steps = (f.d_model + kTileK - 1) / kTileK;
  if (group == 2) {
    registers_down<kGateProducerRegisters>();
    Ring ring;
    ring.phase = 1;  // every stage is free at first
    for (int task = tasks.first; warp == 0 && task < tasks.total(); task += tasks.clusters)
      load_steps(s, ring, x_map, w_map, tasks.block(task, rank) * kTileM, kTileM, tasks.tile(task), rank, steps, lane);
  } else {
    registers_up<kGateConsumerRegisters>();
    consume_persistent<T>(h_map, f, s, marks, tasks, rank, steps, {group, warp, lane});
  }
  cluster_sync();  // no CTA ends while the other may still write to it
}

}  // namespace twell::hopper
