// Sets of neurons as words of 32 bits.
#pragma once

#include <stdint.h>

namespace twell {

// Returns how many bits are set in `bits`, and writes how many are set before each of its words; by one warp. A lane
// takes consecutive words.
__device__ __forceinline__ int count_before(const uint32_t* bits, int* before, int words, int lane) {
  const int each = (words + 31) / 32, first = min(lane * each, words), end = min(first + each, words);
  int mine = 0;
  for (int w = first; w < end; ++w) mine += __popc(bits[w]);
  int upto = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += other;
  }
  for (int w = first, sum = upto - mine; w < end; sum += __popc(bits[w++])) before[w] = sum;
  return __shfl_sync(~0u, upto, 31);
}

}  // namespace twell
