// Sums over the lanes of a warp, and sets of neurons as words of 32 bits.
#pragma once

#include <stdint.h>

namespace twell {

// Returns the sum of `value` over the lanes up to this one; by all lanes of a warp. Lane: int, or what threadIdx.x is.
template <typename Number, typename Lane>
__device__ __forceinline__ Number sum_upto(Number value, Lane lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Number other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// Returns a word of which the first `count` bits are set: none if it is below 1, all from 32 on.
__device__ __forceinline__ uint32_t first_bits(int count) {
  return count <= 0 ? 0 : count < 32 ? (1u << count) - 1 : ~0u;
}

// Returns how many bits are set in `bits`, and writes how many are set before each of its words; by one warp. A lane
// takes consecutive words.
__device__ __forceinline__ int count_before(const uint32_t* bits, int* before, int words, int lane) {
  const int each = (words + 31) / 32, first = min(lane * each, words), end = min(first + each, words);
  int mine = 0;
  for (int w = first; w < end; ++w) mine += __popc(bits[w]);
  const int upto = sum_upto(mine, lane);
  for (int w = first, sum = upto - mine; w < end; sum += __popc(bits[w++])) before[w] = sum;
  return __shfl_sync(~0u, upto, 31);
}

}  // namespace twell
