// The down product after `persistent_gate`, in place of `tiled_down`: CTAs that stay, and take one task of 128 rows and
// kOut outputs after the other. The producers list the union of a task's block and request its first stages while the
// consumers multiply the task before and write its outputs. CTAs that are neighbours have the outputs of one block,
// whose hidden state then comes from memory once.
#pragma once

#include "hopper/mid_rows/down.cuh"

namespace twell::hopper {

// What the producers tell the consumers of a task's block. There are two, for tasks in turns.
struct DownBlock {
  int size;                             // neurons of the union
  bool all;                             // every step is 64 consecutive neurons
  uint32_t nonfinite[kBlockRows / 32];  // a bit a row
};

template <int kOut>
struct PersistentDown {
  static constexpr int kRowBytes = 128 + 16;  // 64 outputs of a row on their way, which puts rows into different banks
  static constexpr int kWarpBytes = 16 * kRowBytes, kStagingBytes = kConsumerWarps * kWarpBytes;
  static constexpr int kStageBytes = TiledDown<kOut, 1>::kStageBytes, kLeastStages = 3;
  static int list_bytes(int d_ff) { return TiledDown<kOut, 1>::list_bytes(d_ff); }
  static int stages(int d_ff) {
    return std::min(kTiledStages, (226 * 1024 - kStagingBytes - list_bytes(d_ff)) / kStageBytes);
  }
};

// What warps share: barriers of the ring and of tasks, and what is known of two tasks.
struct PersistentDownShared {
  uint64_t full[kTiledStages], empty[kTiledStages];
  uint64_t listed[2], left[2];  // by the producers, a task is known; by the consumers' warps, it is done
  DownBlock blocks[2];
  int sums[kProducerWarps];
};

// A task: the block, and which of the `outs` groups of outputs.
struct DownTask {
  int block, out;
  __device__ __forceinline__ DownTask(int task, int outs) : block(task / outs), out(task % outs) {}
};

// Whether every step of a list is 64 consecutive neurons.
__device__ __forceinline__ bool is_consecutive(const uint16_t* list, int size) {
  return size > 0 && size % kTileK == 0 && list[size - 1] - list[0] == size - 1;
}

// Lists the union of the block of this CTA's i-th task and joins its tiles' marks of rows that are not finite. By the
// producers.
__device__ __forceinline__ int list_block(PersistentDownShared& s, const Ffn& f, const TiledMarks& marks, int i,
                                          int tiles, uint16_t* list) {
  const int thread = threadIdx.x - kConsumers, kRowWords = kBlockRows / 32;
  const auto sync = [] { named_sync<kProducers>(4); };
  DownBlock& block = s.blocks[i % 2];
  if (i > 1) barrier_wait(&s.left[i % 2], i / 2 - 1 & 1);
  if (thread < kRowWords) block.nonfinite[thread] = 0;
  sync();  // and nobody reads the list of the task before
  const int size = list_share(marks, f, 1, 0, list, s.sums, thread, sync, [] {});
  for (int word = thread; word < tiles * kRowWords; word += kProducers)
    if (const uint32_t broken = marks.broken[word]) atomicOr(&block.nonfinite[word % kRowWords], broken);
  sync();
  if (thread == 0) {
    block.size = size, block.all = is_consecutive(list, size);
    barrier_arrive(&s.listed[i % 2]);
  }
  return size;
}

template <typename T, int kOut>
__device__ __forceinline__ void produce_persistent_down(Stages& ring, PersistentDownShared& s, const CUtensorMap& w_map,
                                                        const CUtensorMap& h_map, const Ffn& f, int outs,
                                                        uint16_t* list, int* nnz, int tiles) {
  int i = 0;
  for (int t = blockIdx.x; t < f.blocks * outs; t += gridDim.x, ++i) {
    const DownTask task(t, outs);
    const TiledMarks marks(f, task.block, tiles);
    const int size = list_block(s, f, marks, i, tiles, list), m0 = task.block * kBlockRows;
    const int h0 = task.block * f.panels * kPanelColumns;
    const DownLoad<kOut, 1> load{w_map, w_map, h_map, h0, f.d_model, task.out * kOut};
    produce_tiled_down<T, kOut, 1>(ring, load, f, task.block, list, size, is_consecutive(list, size), 0);
    if (task.out == 0)
      write_row_results(f, marks, s.blocks[i % 2].nonfinite, nnz, tiles, m0, min(kBlockRows, f.rows - m0));
  }
  async_wait();
}

// Writes a warp's 16 rows of a task's outputs to y, with the bias, and NaN in rows that are not finite: 64 outputs at a
// time through `staging`, so that whole lines are written.
template <typename T, int kOut>
__device__ __forceinline__ void store_warp_outputs(float (&d)[kOut / 2], unsigned char* staging,
                                                   const DownLoad<kOut, 1>& load, const Ffn& f, const Consumer& c,
                                                   const uint32_t* nonfinite, int m0) {
  static_assert(kOut % 64 == 0);
  constexpr int kRowBytes = PersistentDown<kOut>::kRowBytes;
  const T* bias = static_cast<const T*>(f.b_down);
  const Corner corner(c.lane);
  const int low = c.group * 64 + c.warp * 16;
  unsigned char* to = staging + corner.row * kRowBytes + corner.chunk * 16;
#pragma unroll
  for (int first = 0; first < kOut; first += 64) {
    __syncwarp();
#pragma unroll
    for (int j = first / 8; j < (first + 64) / 8; j += 2) {
      if (bias != nullptr)
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          const int out = load.output(8 * (j + g / 2)) + 2 * (c.lane & 3) + g % 2;
          const float b = out < f.d_model ? static_cast<float>(bias[out]) : 0.f;
          d[4 * (j + g / 2) + g % 2] += b, d[4 * (j + g / 2) + 2 + g % 2] += b;
        }
      store_matrices(to + 16 * (j - first / 8), round_pair<T>(d[4 * j], d[4 * j + 1]),
                     round_pair<T>(d[4 * j + 2], d[4 * j + 3]), round_pair<T>(d[4 * j + 4], d[4 * j + 5]),
                     round_pair<T>(d[4 * j + 6], d[4 * j + 7]));
    }
    __syncwarp();
#pragma unroll
    for (int i = c.lane; i < 16 * 8; i += 32) {
      const int row = i / 8, at = first + i % 8 * 8, out = load.output(at);
      if (m0 + low + row >= f.rows || out >= f.d_model) continue;
      uint4 values = *reinterpret_cast<const uint4*>(staging + row * kRowBytes + i % 8 * 16);
      if (nonfinite[(low + row) / 32] >> (low + row & 31) & 1)
        values = make_uint4(kNanPair, kNanPair, kNanPair, kNanPair);
      store_with<T>(f, m0 + low + row, out, added_to<uint4>(f, m0 + low + row, out), values);
    }
  }
}

template <typename T, int kOut>
__device__ __forceinline__ void consume_persistent_down(Stages& ring, PersistentDownShared& s, const CUtensorMap& w_map,
                                                        const CUtensorMap& h_map, const Ffn& f, int outs,
                                                        unsigned char* staging, const Consumer& c) {
  constexpr int kSide = TiledDown<kOut, 1>::kSide;
  int i = 0;
#pragma unroll 1
  for (int t = blockIdx.x; t < f.blocks * outs; t += gridDim.x, ++i) {
    barrier_wait(&s.listed[i % 2], i / 2 & 1);
    const DownBlock& block = s.blocks[i % 2];
    const int size = uniform(block.size);
    const bool all = uniform(block.all);
    float d[kOut / 2] = {};
    const auto ready = [&](int stage, uint32_t phase) {
      barrier_wait(&ring.full[stage], phase);
      if (!all) fence_async_proxy();  // threads copy through the generic proxy
    };
    const auto release = [&](int stage) { barrier_arrive(&ring.empty[stage]); };
    multiply<T, kOut, kTileK / 16, 1>(d, ring, (size + kTileK - 1) / kTileK, c.group * kSide, 2 * kSide, ready,
                                      c.lane == 0, release, ring.count);
    const DownTask task(t, outs);
    const int h0 = task.block * f.panels * kPanelColumns;
    const DownLoad<kOut, 1> load{w_map, w_map, h_map, h0, f.d_model, task.out * kOut};
    store_warp_outputs<T, kOut>(d, staging + (c.group * 4 + c.warp) * PersistentDown<kOut>::kWarpBytes, load, f, c,
                                block.nonfinite, task.block * kBlockRows);
    __syncwarp();
    if (c.lane == 0) barrier_arrive(&s.left[i % 2]);
  }
}

// Shared memory: `stages` stages of the ring, the consumers' outputs on their way, and the list of a block's union.
template <typename T, int kOut>
__global__ void __launch_bounds__(kThreads, 1)
    persistent_down(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap h_map, const Ffn f,
                    int* nnz, int tiles, int stages) {
  using Down = PersistentDown<kOut>;
  extern __shared__ __align__(1024) unsigned char raw[];
  __shared__ PersistentDownShared s;
  const int thread = threadIdx.x;
  const bool consumes = thread < kConsumers;
  Stages ring{in_register(raw), s.full, s.empty, stages, Down::kStageBytes, !consumes};
  unsigned char* staging = ring.base + stages * Down::kStageBytes;
  if (thread == 0) {
    for (int i = 0; i < stages; ++i)
      barrier_init(&s.full[i], 1 + kProducers), barrier_init(&s.empty[i], kConsumerWarps);
    for (int i = 0; i < 2; ++i) barrier_init(&s.listed[i], 1), barrier_init(&s.left[i], kConsumerWarps);
    fence_barrier_init();
  }
  __syncthreads();
  let_next_launch();
  wait_for_launches();
  const int outs = (f.d_model + kOut - 1) / kOut;
  if (!consumes) {
    registers_down<kProducerRegisters>();
    produce_persistent_down<T, kOut>(ring, s, w_map, h_map, f, outs,
                                     reinterpret_cast<uint16_t*>(staging + Down::kStagingBytes), nnz, tiles);
  } else {
    registers_up<kConsumerRegisters>();
    consume_persistent_down<T, kOut>(ring, s, w_map, h_map, f, outs, staging, Consumer::here());
  }
}

}  // namespace twell::hopper
