// What a forward pass of training returns beside y, from what `keep` left, in one launch: l1, the number of counted
// rows, and firings as 64-bit numbers. And before a backward pass, the gradient of l1 by the number of those rows.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace twell::hopper {

struct Totals {
  int rows, d_ff, parts;
  const uint8_t* finite;   // [rows]
  const uint8_t* counted;  // [rows] or null: all
  const float* l1_parts;   // [parts]: sums of |h| over counted rows
  const int* fires;        // [d_ff]
  float* l1;               // [1]: the sum of l1_parts by counted_rows
  float* counted_rows;     // [1]: finite rows that count, at least 1
  int64_t* wide_fires;     // [d_ff]
};

void launch_totals(const Totals& totals, cudaStream_t stream);
// gradient: [1] of l1, or null, which is 0.
void launch_scale(const float* gradient, const float* counted_rows, float* scale, cudaStream_t stream);

}  // namespace twell::hopper
