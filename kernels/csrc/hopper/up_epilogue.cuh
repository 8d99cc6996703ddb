// The up product's epilogue: writes the hidden state in place of the gate's panels.
#pragma once

#include "hopper/gemm.cuh"

namespace twell::hopper {

// Writes h = g > 0 ? g * (u + bias) : 0 of this warpgroup's rows into the staging tile. bias(column): of a column of
// the tile, if biased. Calls nonfinite_up(row) for rows of the tile that are not finite. used(row): where to add how
// many of the row's neurons have positive g and u, if there is a ReLU on u too; null: nowhere.
template <typename T, int kPanels, typename Bias, typename NonfiniteUp, typename Used>
__device__ __forceinline__ void finish_up(float (&d)[128], Shared& s, const Consumer& c, bool biased, Bias bias,
                                          NonfiniteUp nonfinite_up, Used used) {
  if (biased) {
#pragma unroll
    for (int j = 0; j < 8 * kPanels; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float b = bias(8 * j + 2 * (c.lane & 3) + e);
        d[4 * j + e] += b, d[4 * j + 2 + e] += b;
      }
  }
  const Corner corner(c.lane);
  unsigned char* row = s.staging + (c.group * 64 + c.warp * 16 + corner.row) * 128;
  uint32_t broken[2] = {};  // of the thread's two rows
  int positive = 0;         // how many of each row have positive g and u; the second row's count is 16 bits further
#pragma unroll
  for (int p = 0; p < kPanels; ++p) {
    uint32_t pair[4][4];  // of columns 64 p + 16 j, and of those 8 further, each for the thread's two rows
    const auto at = [&](int j) { return row + p * kPanelBytes + (((2 * j + corner.chunk) ^ (corner.row & 7)) << 4); };
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (!kUpRelu) sm80::load_matrices<false>(pair[j], smem_address(at(j)));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Counting takes the registers of loads ahead.
      if (kUpRelu) sm80::load_matrices<false>(pair[j], smem_address(at(j)));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float u[2] = {up_activated(d[32 * p + 8 * j + 2 * i]), up_activated(d[32 * p + 8 * j + 2 * i + 1])};
        const uint32_t gate = pair[j][i], fired = positive_halves<T>(gate);  // elsewhere the up product is not used
        if constexpr (kUpRelu) positive += ((fired & 1) && u[0] > 0.f) + (fired >> 31 && u[1] > 0.f) << 16 * (i % 2);
        pair[j][i] = fired & round_pair<T>(half_of<T>(gate, 0) * u[0], half_of<T>(gate, 1) * u[1]);
        broken[i % 2] = break_pair<T>(broken[i % 2], pair[j][i]);
      }
      store_matrices(at(j), pair[j][0], pair[j][1], pair[j][2], pair[j][3]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (broken[h] != 0) nonfinite_up(c.row() + 8 * h);
  if constexpr (kUpRelu)
#pragma unroll
    for (int h = 0; h < 2; ++h) add_used(positive >> 16 * h & 0xffff, used(c.row() + 8 * h), c.lane);
}

}  // namespace twell::hopper
