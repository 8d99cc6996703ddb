// The skeleton of the three products: tiles of 128 x 256, k in steps of 64, three stages of A (16 KB) and B (32 KB) in
// shared memory; two consumer warpgroups of 64 rows each, with one product always in flight; a producer warpgroup that
// fills stages; and a 64 KB staging tile, from which a product's results are taken during the next main loop.
#pragma once

#include <type_traits>

#include "common/sm80.cuh"
#include "common/wgmma.cuh"
#include "hopper/activation.cuh"
#include "hopper/params.h"

namespace twell::hopper {

using namespace twell::sm90;

constexpr int kTileM = kBlockRows, kTileN = 256, kTileK = 64, kStages = 3;
constexpr int kABytes = kTileM * kTileK * 2, kBBytes = kTileN * kTileK * 2;
constexpr int kPanelBytes = kTileM * kPanelColumns * 2;
constexpr int kConsumers = 256, kProducers = 128, kThreads = kConsumers + kProducers;
constexpr int kConsumerWarps = kConsumers / 32, kProducerWarps = kProducers / 32;
constexpr int kConsumerRegisters = 208, kProducerRegisters = 88;

struct __align__(1024) Shared {
  unsigned char a[kStages][kABytes];
  unsigned char b[kStages][kBBytes];
  uint64_t full[kStages], empty[kStages];  // stages: filled by the producers, freed by the consumers
  uint64_t staged[2], drained;             // the staging tile: written (by halves, in `up`), and free again
  __align__(1024) unsigned char staging[kTileM * kTileN * 2];  // the last member, as `down` has a larger one
};
constexpr int kSharedBytes = sizeof(Shared);

// A thread's position in the ring of stages.
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ void skip(int steps) { stage += steps, phase ^= stage / kStages & 1, stage %= kStages; }
  // for a warp whose lanes all have the same position
  __device__ __forceinline__ Ring of_warp() const { return {uniform(stage), uniform(phase)}; }
};

// Waits for a round of a barrier as a warp: no lane goes on before the wait has ended for all of them. Lanes are
// answered one by one, and a warp that has diverged stays diverged: a late lane could find the next round over as well,
// and then wait for one that never comes.
__device__ __forceinline__ void wait_as_warp(uint64_t* barrier, uint32_t parity) {
  barrier_wait(barrier, parity);
  __syncwarp();
}

// The position of a thread in a consumer warpgroup.
struct Consumer {
  int group, warp, lane;               // warpgroup 0 or 1, warp 0..3 in it
  int row0 = group * 64, column0 = 0;  // its part of the tile, where columns are K-major: from here on
  static __device__ __forceinline__ Consumer here() {
    const int thread = threadIdx.x;
    return {uniform(thread / 128), uniform(thread / 32 % 4), thread % 32};
  }
  __device__ __forceinline__ bool leads() const { return warp == 0 && lane == 0; }
  __device__ __forceinline__ int row() const { return row0 + warp * 16 + lane / 4; }  // and the row 8 further
  __device__ __forceinline__ void sync() const { named_sync<128>(1 + group); }
};

// The block to take as the i-th: the first block of every window, then the second ones, and so on. First blocks fire
// more, and the longest tasks should not come last.
__device__ __forceinline__ int block_to_take(const Ffn& f, int i) {
  constexpr int kBlocks = kWindow / kBlockRows;
  // the last window may have fewer
  const int whole = f.blocks / kBlocks, more = f.blocks % kBlocks, of_full_columns = more * (whole + 1);
  if (i < of_full_columns) return i % (whole + 1) * kBlocks + i / (whole + 1);
  return (i - of_full_columns) % whole * kBlocks + more + (i - of_full_columns) / whole;
}

// The order in which clusters take tiles of pairs of blocks. All tiles of a pair, then of the next one; or, of weights
// that are more than what stays in the L2 for the next pair, each tile for kPairs pairs, whose rows then stay there.
struct PairTiles {
  static constexpr int64_t kStay = 25 << 20;  // bytes
  static constexpr int kPairs = 8;
  struct Place {
    int pair, tile;
  };
  int pairs, tiles, together;
  __device__ __forceinline__ PairTiles(const Ffn& f, int tiles)
      : pairs((f.blocks + 1) / 2), tiles(tiles), together(int64_t{2} * f.d_model * f.d_ff > kStay ? kPairs : 1) {}
  __device__ __forceinline__ int count() const { return pairs * tiles; }
  __device__ __forceinline__ Place operator[](int i) const {
    const int before = i / (together * tiles) * together, group = min(together, pairs - before),
              at = i - before * tiles;
    return {before + at % group, at / group};
  }
};

// The row of a warp's 16 that a lane addresses when the warp moves four 8 x 8 matrices between registers and shared
// memory, and which of two chunks of eight columns: rows 0..7 and 8..15 of the first chunk, then of the second, in the
// order of a product's accumulators.
struct Corner {
  int row, chunk;
  __device__ __forceinline__ explicit Corner(int lane) : row(lane % 16), chunk(lane / 16) {}
};

// Moves four 8 x 8 matrices in the layout of a product's sums: lane 8 i + j passes the address of row j of matrix i,
// transposed of column j. They are not ordered with ordinary reads and writes: what is written is read after a barrier,
// or by another instruction of this kind.
template <bool kTransposed = false>
__device__ __forceinline__ void store_matrices(void* smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if constexpr (kTransposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(smem)),
                 "r"(a), "r"(b), "r"(c), "r"(d));
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(smem)), "r"(a),
                 "r"(b), "r"(c), "r"(d));
}

// A panel of a block's hidden state.
__device__ __forceinline__ unsigned char* hidden_panel(const Ffn& f, int block, int panel) {
  return static_cast<unsigned char*>(f.hidden) + (static_cast<int64_t>(block) * f.panels + panel) * kPanelBytes;
}

// Fills the ring with `steps` of a tile of a cluster of two: x of this CTA's rows, and half of the weights for both
// CTAs. By a warp.
__device__ __forceinline__ void load_steps(Shared& s, Ring& ring, const CUtensorMap& x_map, const CUtensorMap& w_map,
                                           int m0, int height, int tile, int rank, int steps, int lane) {
  const int bytes = height * (kTileK * 2) + kBBytes;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ring.next()) {
    wait_as_warp(&s.empty[ring.stage], ring.phase);
    if (lane == 0) {
      barrier_expect(&s.full[ring.stage], bytes);
      tma_load_2d(s.a[ring.stage], &x_map, &s.full[ring.stage], step * kTileK, m0);
      tma_load_2d_multicast(s.b[ring.stage] + rank * (kBBytes / 2), &w_map, &s.full[ring.stage], step * kTileK,
                            tile * kTileN + rank * (kTileN / 2), 3);
    }
  }
}

// D[64 x kN] of this warpgroup over `steps` stages. `hook` runs in one of the steps, the hook_at-th or the last; or it
// takes the step, and returns in which it runs again. Frees each stage, in `kCluster` CTAs, once its products are done.
// copied: whether threads' own copies are among those that fill the stages. kTransposeA: A's tile is MN-major, [2
// blocks of 64 rows][64 of k][64]. kArrivals: a warp's at each CTA of a cluster
template <typename T, int kN, int kTransposeB, int kCluster, int kTransposeA = 0, int kArrivals = 1, typename Hook>
__device__ __forceinline__ void multiply(float (&d)[128], Shared& s, Ring& ring, int steps, bool copied,
                                         const Consumer& c, Hook hook, int hook_at = 8) {
  // K-major: 16 columns of K are 32 bytes. MN-major: [4 blocks of 64 n][8 groups of 8 k][8][64]; 16 of K are 2 KB.
  constexpr uint32_t kLead = kTransposeB ? 8192 : 16, kStepB = kTransposeB ? 2048 >> 4 : 32 >> 4;
  constexpr uint32_t kStepA = kTransposeA ? 2048 >> 4 : 32 >> 4;
  const uint32_t empty = remote_address(s.empty, c.lane % kCluster);
  const Operand a0(smem_address(s.a) + uniform(c.row0) * (kTileK * 2), 16, 1024);
  const Operand b0(smem_address(s.b) + uniform(c.column0) * (kTileK * 2), kLead, 1024);
  Ring at = ring.of_warp();
  int last = 0, to_release = 0;  // the stage before, and how many lanes are to free it: none once it is free
  const auto release = [&] {
    if (c.lane >= to_release) return;
    if constexpr (kCluster == 1)
      barrier_arrive_for(&s.empty[last], 32);  // its warp
    else
      barrier_arrive_remote<kArrivals>(empty + 8 * last);
  };
  steps = uniform(steps);
  int hook_step = min(hook_at, steps - 1);  // by the 8th, earlier results have left, so waiting for them is short
#pragma unroll 1
  for (int step = 0; step < steps; ++step, at.next()) {
    if (!barrier_ready(&s.full[at.stage], at.phase)) {  // no stage to multiply yet: free the stage before at once
      wgmma_wait<0>();
      release();
      to_release = 0;
      barrier_wait(&s.full[at.stage], at.phase);
    }
    // written through the generic proxy; the tensor cores read through the async proxy
    if (copied) fence_async_proxy();
    const uint64_t a = a0.at(at.stage * (kABytes >> 4)), b = b0.at(at.stage * (kBBytes >> 4));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k)
      wgmma<T, kN, kTransposeB, kTransposeA>(d, a + k * kStepA, b + k * kStepB, step > 0 || k > 0);
    wgmma_commit();
    if (step == hook_step) {
      if constexpr (std::is_invocable_v<Hook>)
        hook();
      else
        hook_step = hook(step);
    }
    wgmma_wait<1>();
    release();
    last = at.stage, to_release = kCluster;
  }
  wgmma_wait<0>();
  release();
  ring = at;
}

}  // namespace twell::hopper
