// The transpose of a matrix, rounded on the way: Wd by neuron for the products, and its gradient back.
#pragma once

#include "common/convert.cuh"

namespace twell::hopper {

constexpr int kTransposeThreads = 256, kTransposeEdge = 64;  // a CTA has a square of the matrix

// from: [rows, columns]; to: [columns, rows]. Both sizes are multiples of 8, and both addresses of 16 bytes.
template <typename From, typename To>
__global__ void __launch_bounds__(kTransposeThreads) transpose(const From* from, To* to, int rows, int columns) {
  constexpr int kRead = 16 / sizeof(From), kWrite = 16 / sizeof(To);
  constexpr int kPadding = 4 / sizeof(To);  // one word, so that a column lies in different banks
  __shared__ To square[kTransposeEdge][kTransposeEdge + kPadding];
  const int row0 = blockIdx.y * kTransposeEdge, column0 = blockIdx.x * kTransposeEdge;
#pragma unroll
  for (int i = threadIdx.x; i < kTransposeEdge * kTransposeEdge / kRead; i += kTransposeThreads) {
    const int row = i / (kTransposeEdge / kRead), column = i % (kTransposeEdge / kRead) * kRead;
    if (row0 + row >= rows || column0 + column >= columns) continue;
    alignas(16) From read[kRead];
    *reinterpret_cast<uint4*>(read) =
        *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(row0 + row) * columns + column0 + column);
#pragma unroll
    for (int j = 0; j < kRead; ++j) square[row][column + j] = static_cast<To>(read[j]);
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < kTransposeEdge * kTransposeEdge / kWrite; i += kTransposeThreads) {
    const int column = i / (kTransposeEdge / kWrite), row = i % (kTransposeEdge / kWrite) * kWrite;
    if (row0 + row >= rows || column0 + column >= columns) continue;
    alignas(16) To written[kWrite];
#pragma unroll
    for (int j = 0; j < kWrite; ++j) written[j] = square[row + j][column];
    *reinterpret_cast<uint4*>(to + static_cast<int64_t>(column0 + column) * rows + row0 + row) =
        *reinterpret_cast<const uint4*>(written);
  }
}

}  // namespace twell::hopper
