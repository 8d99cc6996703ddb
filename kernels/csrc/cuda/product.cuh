// The product that the launches share: D[kM x kN] = A B^T, from stages of shared memory that asynchronous copies fill,
// in warp tiles of mma.sync. The code that fills a stage determines A and B, so a gathered row costs as much as a
// neighbouring one.
#pragma once

#include "common/convert.cuh"
#include "common/sm80.cuh"
#include "cuda/params.h"

namespace twell::cuda {

using namespace twell::sm80;

// A tile of kM x kN in steps of kK, on kWarpsM x kWarpsN warps, kCtas CTAs to a multiprocessor.
template <int M, int N, int K, int Stages, int WarpsM, int WarpsN, int Ctas>
struct Shape {
  static constexpr int kM = M, kN = N, kK = K, kStages = Stages, kWarpsM = WarpsM, kWarpsN = WarpsN, kCtas = Ctas;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN, kWarpM = kM / kWarpsM, kWarpN = kN / kWarpsN;
  static constexpr int kABytes = kM * kK * 2, kStageBytes = (kM + kN) * kK * 2, kSharedBytes = kStages * kStageBytes;
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && kK % 32 == 0);
};
using Many = Shape<128, 256, 32, 4, 2, 4, 1>;  // 96 KB of stages, which the smallest of these GPUs have
using Block = Shape<64, 128, 64, 3, 2, 2, 3>;
using Some = Shape<64, 64, 64, 3, 2, 2, 3>;
using Few = Shape<16, 32, 64, 8, 1, 2, 4>;  // bound by reading weights: many small CTAs, many copies in flight

// Calls run.operator()<Shape>() for the shape of the gate product's tiles: the largest that gives every multiprocessor
// work.
template <typename Run>
void with_rows(const Ffn& f, Run run) {
  if (f.rows <= 32)
    run.template operator()<Few>();
  else if (f.rows <= 256)
    run.template operator()<Some>();
  else if (f.rows <= 1024)
    run.template operator()<Block>();
  else
    run.template operator()<Many>();
}

// The same for `up` and `down`, whose tiles are as high as blocks.
template <typename Run>
void with_block(const Ffn& f, Run run) {
  if (f.block == Few::kM)
    run.template operator()<Few>();
  else
    run.template operator()<Block>();
}

// Position of 16-byte chunk `chunk` of row `row` among rows of kChunks: eight rows of one chunk use all banks.
template <int kChunks>
__device__ __forceinline__ int chunk_place(int row, int chunk) {
  const int turn = kChunks >= 8 ? row & 7 : row >> 1 & 3;
  return (row * kChunks + (chunk ^ turn)) * 16;
}

// Copies kRows rows by kK columns of a row-major matrix into a stage; a thread copies one chunk of every kEvery-th row.
// The loop of large tiles is bound by instructions, so there missing rows are copies of the last one, and their sums
// are not used.
template <typename T, typename S, int kRows>
struct Rows {
  static constexpr int kChunks = S::kK / 8, kEvery = S::kThreads / kChunks, kMine = kRows / kEvery;
  static constexpr bool kZeros = kRows <= 16;  // few rows, most of which may be missing: missing ones are not read
  static_assert(kRows % kEvery == 0 && kEvery % 8 == 0);
  uint32_t from[kMine];  // starts of rows, in chunks from the start of the matrix
  int many;

  template <typename Row>  // row(r): the matrix row that is the tile's row r, for r below `rows`
  __device__ __forceinline__ void aim(int columns, int rows, Row row) {
    many = rows;
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      from[i] = static_cast<uint32_t>(row(min(static_cast<int>(threadIdx.x) / kChunks + i * kEvery, rows - 1))) *
                (columns / 8);
  }
  __device__ __forceinline__ void copy(uint32_t stage, const void* matrix, int step, int end) const {
    const int first = threadIdx.x / kChunks, own = threadIdx.x % kChunks, chunk = step * kChunks + own;
    const bool inside = 8 * chunk < end;  // else zeros
    stage += chunk_place<kChunks>(first, own);
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      copy_16(stage + i * kEvery * S::kK * 2, static_cast<const uint4*>(matrix) + (from[i] + chunk),
              inside && (!kZeros || first + i * kEvery < many));
  }
};

template <typename S>
using Sum = float[S::kWarpM / 16][S::kWarpN / 8][4];

// Position of a thread's sums in the tile: rows 16 i + 8 h and columns 8 j + e after its first.
template <typename S>
struct Place {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int row0 = warp % S::kWarpsM * S::kWarpM, column0 = warp / S::kWarpsM * S::kWarpN;
  int row = row0 + lane / 4, column = column0 + 2 * (lane & 3);
};

// Fills the first stages. fill(step, a, b) issues the copies of a step to these addresses; steps are filled in order.
template <typename S, typename Fill>
__device__ __forceinline__ void start(uint32_t shared, int steps, Fill& fill) {
#pragma unroll
  for (int i = 0; i < S::kStages - 1; ++i) {
    if (i < steps) fill(i, shared + i * S::kStageBytes, shared + i * S::kStageBytes + S::kABytes);
    copies_commit();
  }
}

// Loads a warp's operands of the k-th 16 columns of a stage. B is in the stage as [kN][kK], or with kByRow as [kK][kN].
template <typename S, bool kByRow>
__device__ __forceinline__ void load_operands(uint32_t (&a)[S::kWarpM / 16][4], uint32_t (&b)[S::kWarpN / 16][4],
                                              uint32_t stage, int k, const Place<S>& p) {
  const int eighth = p.lane & 7, odd = p.lane >> 3 & 1, upper = p.lane >> 4;
  const uint32_t b_at = stage + S::kABytes;
#pragma unroll
  for (int i = 0; i < S::kWarpM / 16; ++i)
    load_matrices<false>(a[i], stage + chunk_place<S::kK / 8>(p.row0 + 16 * i + 8 * odd + eighth, 2 * k + upper));
#pragma unroll
  for (int j = 0; j < S::kWarpN / 16; ++j)
    if constexpr (kByRow)
      load_matrices<true>(b[j],
                          b_at + chunk_place<S::kN / 8>(16 * k + 8 * odd + eighth, p.column0 / 8 + 2 * j + upper));
    else
      load_matrices<false>(b[j], b_at + chunk_place<S::kK / 8>(p.column0 + 16 * j + 8 * upper + eighth, 2 * k + odd));
}

// Sums over all steps, after `start`. kByRow is that of `load_operands`. An idle warp copies and multiplies nothing.
// The stages are free again after a barrier.
template <typename T, typename S, bool kByRow, typename Fill>
__device__ __forceinline__ void multiply(Sum<S>& d, uint32_t shared, int steps, bool idle, Fill& fill) {
  constexpr int kSub = S::kK / 16, kMi = S::kWarpM / 16, kNi = S::kWarpN / 8;
  const Place<S> p;
#pragma unroll
  for (int i = 0; i < kMi; ++i)
#pragma unroll
    for (int j = 0; j < kNi; ++j) d[i][j][0] = d[i][j][1] = d[i][j][2] = d[i][j][3] = 0.f;
  if (steps == 0) return;

  uint32_t a[2][kMi][4], b[2][kNi / 2][4];
  const auto load = [&](int stage, int k, uint32_t(&to_a)[kMi][4], uint32_t(&to_b)[kNi / 2][4]) {
    load_operands<S, kByRow>(to_a, to_b, shared + stage * S::kStageBytes, k, p);
  };

  copies_wait<S::kStages - 2>();
  __syncthreads();
  if (!idle) load(0, 0, a[0], b[0]);
  int stage = 0;
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int k = 0; k < kSub; ++k) {
      const int next = stage + 1 == S::kStages ? 0 : stage + 1;
      if (k == kSub - 1) {  // the next step's first operands are loaded while this one's last are multiplied
        copies_wait<S::kStages - 2>();
        __syncthreads();
      }
      if (!idle) load(k == kSub - 1 ? next : stage, (k + 1) % kSub, a[(k + 1) & 1], b[(k + 1) & 1]);
      if (k == 0) {  // every warp has left the stage before this one
        const int ahead = step + S::kStages - 1, to = stage == 0 ? S::kStages - 1 : stage - 1;
        if (ahead < steps) fill(ahead, shared + to * S::kStageBytes, shared + to * S::kStageBytes + S::kABytes);
        copies_commit();
      }
      if (!idle) {
#pragma unroll
        for (int i = 0; i < kMi; ++i)
#pragma unroll
          for (int j = 0; j < kNi; ++j)
            mma_16x8x16<T>(d[i][j], a[k & 1][i], b[k & 1][j / 2][2 * (j & 1)], b[k & 1][j / 2][2 * (j & 1) + 1]);
      }
      if (k == kSub - 1) stage = next;
    }
  }
}

}  // namespace twell::cuda
