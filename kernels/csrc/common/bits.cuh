// Sets of neurons as words of 32 bits.
#pragma once

#include <stdint.h>

namespace twell {

// How many bits stand before each word of `bits`, by one warp; returns how many there are.
__device__ __forceinline__ int count_before(const uint32_t* bits, int* before, int words, int lane) {
  int sum = 0;
  for (int w0 = 0; w0 < words; w0 += 32) {
    const int w = w0 + lane, mine = w < words ? __popc(bits[w]) : 0;
    int upto = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += other;
    }
    if (w < words) before[w] = sum + upto - mine;
    sum += __shfl_sync(~0u, upto, 31);
  }
  return sum;
}

}  // namespace twell
