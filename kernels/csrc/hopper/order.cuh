// The order in which blocks take rows: by nnz, most first, within each window of 1024, so that the few rows that fire many neurons
// share blocks and leave the unions of the others small. Rows of equal nnz keep their order: the same input has the same blocks.
//
// Windows whose rows all fire about as many neurons stay as they are: blocks of consecutive rows are read whole.
#pragma once

#include "hopper/gemm.cuh"

namespace twell::hopper {

constexpr int kOrderCtas = kWindow / kBlockRows;  // to a window, a cluster: a block's rows each
constexpr int kOrderThreads = 2 * kBlockRows, kOrderWarps = kOrderThreads / 32;

// The sum of every thread's value, to every thread. sums: [kOrderWarps], free again after the next barrier.
__device__ __forceinline__ unsigned long long add_up(unsigned long long value, unsigned long long* sums) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
#pragma unroll
  for (int warp = 0; warp < kOrderWarps; ++warp) value += sums[warp];
  return value;
}

// A CTA counts a block's rows and tells the others of its cluster; each then finds the places of its own rows.
static __global__ void __launch_bounds__(kOrderThreads) order(const Ffn f) {
  constexpr int kRowBits = 10, kRowsOfWarp = kBlockRows / kOrderWarps;
  static_assert(kWindow == 1 << kRowBits);
  __shared__ __align__(16) uint32_t mine[kBlockRows], keys[kWindow];
  __shared__ unsigned long long sums[kOrderWarps], squares[kOrderWarps];
  const int t = threadIdx.x, warp = t / 32, lane = t % 32, rank = cluster_rank();
  const int m0 = blockIdx.x / kOrderCtas * kWindow, first = rank * kBlockRows, rows = min(kWindow, f.rows - m0);
  let_next_launch();
  wait_for_launches();
  if (blockIdx.x == 0) {  // the launches from here on count up from zero
    if (t == 0) f.tasks[0] = 0;
    for (int i = t; i < kParts * kPartWarps; i += kOrderThreads) f.part_ready[i] = 0;
  }

  const int row0 = first + warp * kRowsOfWarp;  // in the window, the warp's first
  int nnz[kRowsOfWarp] = {};
  for (int tile = lane; tile < f.tiles; tile += 32)
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i)
      if (row0 + i < rows) nnz[i] += f.heads[(static_cast<int64_t>(m0 + row0 + i) * f.tiles + tile) * kHead] & kCount;
  const bool finite = lane < kRowsOfWarp && row0 + lane < rows && f.finite[m0 + row0 + lane];
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    const int sum = __reduce_add_sync(~0u, nnz[i]);
    if (lane == i) mine[warp * kRowsOfWarp + i] = finite ? sum : 0;
  }
  cluster_sync();  // all have begun, and `mine` is whole
  store_remote(remote_address(keys + first + 4 * lane, warp), reinterpret_cast<const float4*>(mine)[lane]);
  cluster_sync();

  unsigned long long sum = 0, square = 0;
  for (int i = t; i < kWindow; i += kOrderThreads) sum += keys[i], square += static_cast<unsigned long long>(keys[i]) * keys[i];
  sum = add_up(sum, sums), square = add_up(square, squares);
  // Their deviation, at most a quarter of the mean or a 256th of d_ff: what sorting gains is then less than what scattered rows cost.
  const unsigned long long spread = rows * square - sum * sum, least = static_cast<unsigned long long>(rows) * f.d_ff;
  const bool stays = 16 * spread <= sum * sum || spread <= least * least >> 16;
  if (t < 32) {  // what the block fires, where it is of rows in place
    const uint4 four = reinterpret_cast<const uint4*>(mine)[lane];
    const int fired = __reduce_add_sync(~0u, four.x + four.y + four.z + four.w);
    const int block = (m0 + first) / kBlockRows;
    if (lane == 0 && block < f.blocks) f.fired_in_place[block] = stays ? fired : -1;
  }
  if (stays) {
    if (t < kBlockRows) f.order[m0 + first + t] = m0 + first + t;
    return;
  }
  const uint32_t last = (1u << (32 - kRowBits)) - 1;  // where there is no row
  for (int i = t; i < kWindow; i += kOrderThreads) keys[i] = (i < rows ? last - 1 - keys[i] : last) << kRowBits | i;
  __syncthreads();
  const uint32_t key = keys[first + t / 2];  // two threads count the keys before a row's
  int before = 0;
#pragma unroll 8
  for (int i = t % 2; i < kWindow / 4; i += 2) {
    const uint4 four = reinterpret_cast<const uint4*>(keys)[i];
    before += (four.x < key) + (four.y < key) + (four.z < key) + (four.w < key);
  }
  before += __shfl_xor_sync(~0u, before, 1);
  if (t % 2 == 0) f.order[m0 + before] = m0 + static_cast<int>(key & (kWindow - 1));
}

}  // namespace twell::hopper
