// The gate product, z = x Wg^T + b, whose epilogue is TwELL: nothing dense leaves the chip but tiles past their slots.
//
// Clusters of two CTAs take the two row tiles of a pair and the same 256 neurons; each loads half of the weights' tile for both.
// Consumers round relu(z) into the staging tile and go on; packing warps turn it into words during the next main loop.
#pragma once

#include "hopper/gemm.cuh"

namespace twell::hopper {

constexpr int kPackWarps = kProducerWarps - 1;
using Lines = uint32_t[kTileM][kWords + 1];  // words of a tile's rows, a bank apart

__device__ __forceinline__ void store_matrices(void* smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(smem)), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The staging tile here: [128 rows][32 chunks of 16 bytes], chunk c of row r at c ^ (r % 8), so that neither side conflicts.
__device__ __forceinline__ unsigned char* staged_chunk(unsigned char* staging, int row, int chunk) {
  return staging + row * (kTileN * 2) + ((chunk ^ (row & 7)) << 4);
}

// Rounds the accumulator into the staging tile, and marks rows that are not finite.
template <typename T>
__device__ __forceinline__ void stage_gate(float (&d)[128], Shared& s, const Ffn& f, int m0, int n0, const Consumer& c) {
  if (const T* bias = static_cast<const T*>(f.b_gate)) {
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      const int column = n0 + 8 * j + 2 * (c.lane & 3);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float b = column + e < f.d_ff ? static_cast<float>(bias[column + e]) : 0.f;
        d[4 * j + e] += b, d[4 * j + 2 + e] += b;
      }
    }
  }
  float broken[2] = {0.f, 0.f}, peak[2] = {0.f, 0.f};  // of the thread's two rows; inf or NaN times 0 is NaN, and stays
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) broken[h] = fmaf(d[4 * j + 2 * h + e], 0.f, broken[h]);
  if (std::is_same_v<T, __half> || f.w_up == nullptr) {  // else `up` sees what bfloat16 makes of the last values before inf
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) peak[h] = fmaxf(peak[h], fmaxf(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]));
  }
  const int matrix = c.lane >> 3, row = c.group * 64 + c.warp * 16 + (matrix & 1) * 8 + (c.lane & 7);
#pragma unroll
  for (int j = 0; j < kTileN / 8; j += 2)
    store_matrices(staged_chunk(s.staging, row, j + (matrix >> 1)), round_relu<T>(d[4 * j], d[4 * j + 1]),
                   round_relu<T>(d[4 * j + 2], d[4 * j + 3]), round_relu<T>(d[4 * j + 4], d[4 * j + 5]),
                   round_relu<T>(d[4 * j + 6], d[4 * j + 7]));
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (broken[h] != 0.f || !stays_finite<T>(peak[h])) {
      const int at = m0 + c.row() + 8 * h;
      if (at < f.rows) f.finite[at] = 0;
    }
}

// A warp turns 32 rows of the staging tile into words. Each lane takes its own row: what fired as 256 bits, without a branch, then
// a step for each slot, ascending, into shared memory; the warp then writes the words in use, eight at a time. A row past
// its slots has its count alone, and leaves whole, as it lies in the staging tile. Other words are whatever they were.
template <typename T>
__device__ __forceinline__ void pack_rows(unsigned char* staging, Lines& lines, const Ffn& f, int row0, int m0, int tile, int lane) {
  const int row = row0 + lane;
  uint32_t* line = lines[row];
  uint32_t mask[8], count = 0;
#pragma unroll
  for (int w = 0; w < 8; ++w) {
    mask[w] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      mask[w] |= positive(*reinterpret_cast<const uint4*>(staged_chunk(staging, row, 4 * w + i))) << (8 * i);
  }
#pragma unroll
  for (int w = 0; w < 8; ++w) count += __popc(mask[w]);
  const int rows = min(32, f.rows - m0 - row0);
  const int64_t at = static_cast<int64_t>(m0 + row0) * f.tiles + tile;  // of the first row; the next is `tiles` on
  if (count > kSlots) {
    if (lane < rows)
      bulk_store(static_cast<T*>(f.spill) + (at + static_cast<int64_t>(lane) * f.tiles) * kTile, staging + row * (kTile * 2),
                 kTile * 2);
  } else {
    uint32_t slot = 1;
#pragma unroll
    for (int w = 0; w < 8; ++w)
      for (uint32_t left = mask[w]; left; left &= left - 1) {
        const int column = 32 * w + __ffs(left) - 1;
        const uint32_t value = *reinterpret_cast<const uint16_t*>(staged_chunk(staging, row, column / 8) + 2 * (column % 8));
        line[slot++] = column | value << 16;
      }
  }
  bulk_commit();
  line[0] = count;
  __syncwarp();
  for (int first = 0; first < kWords; first += kHead) {  // eight words of four rows at a time
    if (!__any_sync(~0u, first == 0 || (count >= first && count <= kSlots))) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = 4 * i + lane / 8, used = lines[row0 + r][0], word = first + lane % 8;
      const int64_t tile_of_row = at + static_cast<int64_t>(r) * f.tiles;
      uint32_t* to = first == 0 ? f.heads + tile_of_row * kHead + word : f.tails + tile_of_row * kTail + word - kHead;
      if (r < rows && (first == 0 || (used >= first && used <= kSlots))) *to = lines[row0 + r][word];
    }
  }
  bulk_wait_read<0>();
  __syncwarp();
}

template <typename T>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    gate(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const Ffn f) {
  extern __shared__ unsigned char raw[];
  Shared& s = aligned(raw);
  __shared__ Lines lines;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const uint32_t rank = cluster_rank();

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], 2 * kConsumerWarps);
    barrier_init(&s.staged[0], kConsumers), barrier_init(&s.drained, kPackWarps * 32);
    fence_barrier_init();
    if (blockIdx.x == 0) f.tasks[0] = 0;  // the plan, the next launch, counts from here
  }
  cluster_sync();

  const int clusters = gridDim.x / 2, first = blockIdx.x / 2;
  const int pairs = (f.rows + 2 * kTileM - 1) / (2 * kTileM), total = pairs * f.tiles;
  const int steps = (f.d_model + kTileK - 1) / kTileK;

  if (group == 2) {
    registers_down<kProducerRegisters>();
    if (warp == 0) {
      if (lane == 0) {
        Ring ring;
        ring.phase = 1;  // every stage is free at first
        for (int t = first; t < total; t += clusters) {
          const int n0 = t % f.tiles * kTileN, m0 = (t / f.tiles * 2 + rank) * kTileM;
          for (int step = 0; step < steps; ++step, ring.next()) {
            barrier_wait(&s.empty[ring.stage], ring.phase);
            barrier_expect(&s.full[ring.stage], kABytes + kBBytes);
            tma_load_2d(s.a[ring.stage], &x_map, &s.full[ring.stage], step * kTileK, m0);
            tma_load_2d_multicast(s.b[ring.stage] + rank * (kBBytes / 2), &w_map, &s.full[ring.stage], step * kTileK,
                                  n0 + rank * (kTileN / 2), 3);
          }
        }
      }
      __syncwarp();
    } else {
      uint32_t phase = 0;
      for (int t = first; t < total; t += clusters, phase ^= 1) {
        const int tile = t % f.tiles, m0 = (t / f.tiles * 2 + rank) * kTileM;
        barrier_wait(&s.staged[0], phase);
        for (int row0 = 32 * (warp - 1); row0 < min(kTileM, f.rows - m0); row0 += 32 * kPackWarps)
          pack_rows<T>(s.staging, lines, f, row0, m0, tile, lane);
        barrier_arrive(&s.drained);
      }
    }
  } else {
    registers_up<kConsumerRegisters>();
    const Consumer c{group, warp, lane};
    Ring ring;
    uint32_t phase = 1;  // the staging tile is free at first
    float d[128];
    for (int t = first; t < total; t += clusters, phase ^= 1) {
      const int n0 = t % f.tiles * kTileN, m0 = (t / f.tiles * 2 + rank) * kTileM;
      multiply<T, kTileN, 0, 2, false>(d, s, ring, steps, c, [] {});
      barrier_wait(&s.drained, phase);
      stage_gate<T>(d, s, f, m0, n0, c);
      fence_async_proxy();  // rows past their slots leave by the copy engine
      barrier_arrive(&s.staged[0]);
    }
  }
  cluster_sync();  // no CTA leaves while the other may still write to it
}

}  // namespace twell::hopper
