// dx = du Wu + dg Wg: for each block of rows, first its union's rows of Wu, then those of Wg.
#pragma once

#include "hopper/backward/gathered_product.cuh"

namespace twell::hopper {

// Writes the outputs of a warp's rows in bits of T: NaN in those that are not finite. row_of(r): the r-th of them
template <typename T, int kN, typename Row>
__device__ __forceinline__ void write_dx(const Backward& b, float (&d)[128], Shared& s, const SharedPiece& piece,
                                         const Consumer& c, Row row_of) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row_of(c.lane / 4 + 8 * h);
    if (row >= b.rows || b.finite[row]) continue;
#pragma unroll
    for (int i = 0; i < 64; ++i) d[4 * (i / 2) + 2 * h + i % 2] = __int_as_float(0x7fffffff);  // NaN
  }
  __syncwarp();
  write_rows<T, T, kN>(d, s, c, piece.column * kTileN, b.d_model, [&](int r) {
    const int row = row_of(r);
    return row < b.rows ? static_cast<T*>(b.dx) + static_cast<int64_t>(row) * b.d_model : nullptr;
  });
}

template <typename T, typename PassOf = Backward>
struct DxJob {
  using Value = T;
  using Pass = PassOf;
  const Pass& b;

  __device__ __forceinline__ bool is_needless() const { return false; }
  __device__ __forceinline__ int d_model() const { return b.d_model; }
  __device__ __forceinline__ int items() const { return b.blocks; }
  __device__ __forceinline__ int columns() const { return (b.d_model + kTileN - 1) / kTileN; }
  __device__ __forceinline__ int phases() const { return 1; }
  __device__ __forceinline__ bool is_light(int) const { return false; }
  __device__ __forceinline__ int first_output(int column) const { return column * kTileN; }
  __device__ __forceinline__ int steps(int block) const {
    return 2 * ((abs(b.kept.union_sizes[block]) + kTileK - 1) / kTileK);
  }
  __device__ __forceinline__ int panel_bytes(int) const { return kPanelBytes; }
  __device__ __forceinline__ const void* panel(int block, int, int step, int steps) const {
    const int at = step < steps / 2 ? step : b.panels + step - steps / 2;
    return static_cast<const unsigned char*>(b.panels_of_rows) +
           (static_cast<int64_t>(block) * 2 * b.panels + at) * kPanelBytes;
  }
  __device__ __forceinline__ const void* matrix(int, int step, int steps) const {
    return step < steps / 2 ? b.w_up : b.w_gate;
  }
  __device__ __forceinline__ int row(int block, int step, int place) const {
    const int half = steps(block) / 2, panel = step < half ? step : step - half;
    return b.kept.unions[(static_cast<int64_t>(block) * b.panels + panel) * kPanelColumns + place];
  }
  template <int kN>
  __device__ __forceinline__ void write(float (&d)[128], Shared& s, const SharedPiece& piece, const Consumer& c) const {
    const int* order = b.kept.order + piece.item * kBlockRows + c.group * 64 + c.warp * 16;
    write_dx<T, kN>(b, d, s, piece, c, [&](int r) { return order[r]; });
  }
};

}  // namespace twell::hopper
