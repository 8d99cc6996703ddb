// The order in which blocks take rows: by nnz, most first, within each window of 1024, so that the few rows that fire
// many neurons share blocks and the unions of other blocks stay small. Rows of equal nnz keep their order: the same
// input has the same blocks.
//
// Windows whose rows all fire about as many neurons keep their order: blocks of consecutive rows are read whole. If the
// gate's kernel continues with the up products of dense tiles, windows of high nnz keep theirs sooner: their blocks run
// dense in any order. Those of which most tiles are dense always do: clusters may have made their up products.
//
// Each CTA of the plan determines its block's rows by itself, from the sums that the gate has made.
#pragma once

#include "common/bits.cuh"
#include "hopper/gemm.cuh"
#include "hopper/many_rows/dense_tiles.cuh"

namespace twell::hopper {

constexpr int kPlanThreads = 512;

// In shared memory. Rows are keys, in the order in which blocks take them: by how few neurons they fire, then by their
// number in the window; positions past the last row come last.
struct Window {
  static constexpr int kRowBits = 10, kDigit = 8, kDigits = 1 << kDigit;
  static_assert(kWindow == 1 << kRowBits);
  __align__(16) uint32_t keys[kWindow];
  // the block's keys in order; and in the order in which they were found
  __align__(16) uint32_t block[kBlockRows], taken[kBlockRows];
  // of 32 rows' nnz; of its square's low halves, and of the high ones
  uint32_t sums[kWindow / 32], squares[2][kWindow / 32];
  uint32_t broken[kWindow / 32];        // a bit a row that is not finite
  uint32_t nonfinite_up[kWindow / 32];  // likewise, by up products alone: the order does not depend on it
  uint32_t bounds[2];                   // the block's first key and its last
  int ranks[2];                         // how many keys that begin with the same digits precede them
  uint32_t digits[2][kDigits];          // how many such keys follow with each next digit
  int many;                             // of `taken`
  bool dense;                           // of high nnz, and most of its tiles are dense

  static __device__ __forceinline__ uint32_t key(const Ffn& f, int row, bool there, uint32_t nnz) {
    return (there ? f.d_ff - nnz : f.d_ff + 1) << kRowBits | row;
  }
  static __device__ __forceinline__ int row_of(uint32_t key) { return key & (kWindow - 1); }
  static __device__ __forceinline__ int nnz_of(const Ffn& f, uint32_t key) {
    return f.d_ff - static_cast<int>(key >> kRowBits);
  }
  __device__ __forceinline__ bool finite(uint32_t key) const { return !(broken[row_of(key) / 32] >> (key & 31) & 1); }
  __device__ __forceinline__ bool finite_up(uint32_t key) const {
    return !(nonfinite_up[row_of(key) / 32] >> (key & 31) & 1);
  }
};

// Determines w.bounds, the keys that have w.ranks keys before them, by all threads: one digit after the other, among
// the keys that begin with the same digits.
__device__ __forceinline__ void find_bounds(Window& w, uint32_t greatest, int warp, int lane) {
  constexpr int kEach = Window::kDigits / 32;  // digits for each lane
  for (int shift = (31 - __clz(greatest)) / Window::kDigit * Window::kDigit; shift >= 0; shift -= Window::kDigit) {
    for (int i = threadIdx.x; i < 2 * Window::kDigits; i += kPlanThreads) w.digits[0][i] = 0;
    __syncthreads();
#pragma unroll
    for (int row = threadIdx.x; row < kWindow; row += kPlanThreads) {
      const uint32_t key = w.keys[row] >> shift;
#pragma unroll
      for (int b = 0; b < 2; ++b)
        if (key >> Window::kDigit == w.bounds[b]) atomicAdd(&w.digits[b][key % Window::kDigits], 1);
    }
    __syncthreads();
    if (warp < 2) {
      uint32_t many[kEach], sum = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += many[i] = w.digits[warp][lane * kEach + i];
      const uint32_t upto = sum_upto(sum, lane);
      const uint32_t rank = w.ranks[warp], bound = w.bounds[warp];
      uint32_t before = upto - sum;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kEach; before += many[i++])
        if (before <= rank && rank < before + many[i])
          w.bounds[warp] = bound << Window::kDigit | (lane * kEach + i), w.ranks[warp] = rank - before;
    }
    __syncthreads();
  }
}

// Reads what the rows of the block's window fire, by all threads, and calls meanwhile() while the reads are in flight;
// returns whether they stay in place. All that was written before is then visible to all threads.
template <typename Meanwhile>
__device__ __forceinline__ bool read_window(const Ffn& f, Window& w, int block, Meanwhile meanwhile) {
  constexpr int kEach = kWindow / kPlanThreads;  // rows for each thread
  const int t = threadIdx.x, lane = t % 32;
  const int m0 = block * kBlockRows / kWindow * kWindow, first = block * kBlockRows - m0,
            rows = min(kWindow, f.rows - m0);
  uint32_t words[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = t + i * kPlanThreads;
    words[i] = row < rows ? f.row_sums[m0 + row] : 0;
  }
  meanwhile();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = t + i * kPlanThreads;
    const uint32_t broken = __ballot_sync(~0u, words[i] & kNonfiniteGate),
                   nonfinite_up = __ballot_sync(~0u, words[i] & kNonfiniteUp);
    const uint32_t nnz = words[i] & kNonfiniteGate ? 0 : words[i] & ~kNonfiniteUp;
    w.keys[row] = Window::key(f, row, row < rows, nnz);
    const uint32_t sum = __reduce_add_sync(~0u, nnz), square = nnz * nnz;
    const uint32_t low = __reduce_add_sync(~0u, square & 0xffff), high = __reduce_add_sync(~0u, square >> 16);
    if (lane == 0) {
      w.broken[row / 32] = broken, w.nonfinite_up[row / 32] = nonfinite_up;
      w.sums[row / 32] = sum, w.squares[0][row / 32] = low, w.squares[1][row / 32] = high;
    }
  }
  if (t < 2) w.bounds[t] = 0, w.ranks[t] = first + t * (kBlockRows - 1);
  if (t == 0) w.many = 0, w.dense = f.dense_tiles != nullptr && DensePairs(f).mostly_dense(f, m0 / kWindow, rows);
  __syncthreads();
  static_assert(kWindow / 32 == 32);  // a lane for each
  const unsigned long long sums = __reduce_add_sync(~0u, w.sums[lane]);
  const unsigned long long squares =
      __reduce_add_sync(~0u, w.squares[0][lane]) +
      (static_cast<unsigned long long>(__reduce_add_sync(~0u, w.squares[1][lane])) << 16);
  // Whether their deviation is at most a quarter of the mean, or a 256th of d_ff and the mean, or a 1024th of d_ff:
  // sorting then gains less than scattered rows cost. In a window of high nnz, half of the mean; any if most of its
  // tiles are dense.
  const unsigned long long spread = rows * squares - sums * sums, most = static_cast<unsigned long long>(rows) * f.d_ff;
  const unsigned long long little = most * most >> 16;
  const int share =
      f.dense_tiles != nullptr && is_high_nnz(kHighNnzWindow, DensePairs(f).fired(m0 / kWindow), rows, f.d_ff) ? 4 : 16;
  const bool alike = share * spread <= sums * sums || spread <= min(sums * sums, little);
  return w.dense || alike || spread <= little >> 4;
}

// Writes the keys of the block's rows to w.block, most first, by all threads, if the window's rows do not stay in
// place.
__device__ __forceinline__ void sort_window(const Ffn& f, Window& w) {
  const int t = threadIdx.x, warp = t / 32, lane = t % 32;
  find_bounds(w, Window::key(f, kWindow - 1, false, 0), warp, lane);
#pragma unroll
  for (int row = t; row < kWindow; row += kPlanThreads)
    if (const uint32_t key = w.keys[row]; key >= w.bounds[0] && key <= w.bounds[1])
      w.taken[atomicAdd(&w.many, 1)] = key;
  __syncthreads();
  constexpr int kShare = kPlanThreads / kBlockRows;  // threads that count the keys before one
  const uint32_t key = w.taken[t / kShare];
  int before = 0;
#pragma unroll
  for (int i = t % kShare; i < kBlockRows / 4; i += kShare) {
    const uint4 four = reinterpret_cast<const uint4*>(w.taken)[i];
    before += (four.x < key) + (four.y < key) + (four.z < key) + (four.w < key);
  }
#pragma unroll
  for (int step = 1; step < kShare; step *= 2) before += __shfl_xor_sync(~0u, before, step);
  if (t % kShare == 0) w.block[before] = key;
  __syncthreads();
}

}  // namespace twell::hopper
