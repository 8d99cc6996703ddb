// The products of a compact pass: those of any other, over panels and chunks without gaps; and the dense ones.
#pragma once

#include "hopper/backward/compact/lists.cuh"
#include "hopper/backward/dx.cuh"
#include "hopper/backward/weights.cuh"

namespace twell::hopper {

__device__ __forceinline__ bool needs_no_products(const CompactBackward& b) { return *b.fits <= 0; }
__device__ __forceinline__ bool needs_no_passes(const CompactBackward& b) { return *b.fits != 0; }

__device__ __forceinline__ int64_t first_panel(const CompactBackward& b, int block, int which) {
  const int start = b.panel_starts[block];
  return 2 * start + which * (b.panel_starts[block + 1] - start);
}

__device__ __forceinline__ int64_t chunk_at(const CompactBackward& b, int group, int chunk) {  // in values
  return static_cast<int64_t>(b.chunk_starts[group]) + static_cast<int64_t>(chunk) * kChunkValues;
}

// Adds the bias of each of kN columns, of neurons from `neuron0` on, to a thread's sums; if there is one.
template <typename T, int kN>
__device__ __forceinline__ void add_bias(float (&z)[128], const void* bias, int neuron0, int d_ff, int lane) {
  if (bias == nullptr) return;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const int neuron = neuron0 + 8 * j + 2 * (lane & 3);  // even, as d_ff is
    if (neuron >= d_ff) continue;
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(static_cast<const T*>(bias) + neuron);
    const float low = half_of<T>(pair, 0), high = half_of<T>(pair, 1);
    z[4 * j] += low, z[4 * j + 1] += high, z[4 * j + 2] += low, z[4 * j + 3] += high;
  }
}

// A thread's part of a piece that several CTAs share. Slots of the first phase have whole tiles, those of the second
// one half as much.
__device__ __forceinline__ float4* part_of(const CompactBackward& b, int slot) {
  constexpr int kFours = kTileM * kTileN / 4;
  static_assert(kFours * 16 == kPartBytesOfTile);
  const int cta = slot / 2, whole = min(cta, kMostCtas);
  return reinterpret_cast<float4*>(b.sides[slot % 2]) + static_cast<int64_t>(whole) * kFours +
         static_cast<int64_t>(cta - whole) * (kFours / 2) + threadIdx.x;
}

template <typename T>
struct CompactDxJob : DxJob<T, CompactBackward> {
  using DxJob<T, CompactBackward>::b;
  __device__ __forceinline__ explicit CompactDxJob(const CompactBackward& pass) : DxJob<T, CompactBackward>{pass} {}
  __device__ __forceinline__ bool is_needless() const { return needs_no_products(b); }
  __device__ __forceinline__ const void* panel(int block, int, int step, int) const {  // dg follows du
    return static_cast<const unsigned char*>(b.panels_of_rows) + (first_panel(b, block, 0) + step) * kPanelBytes;
  }
};

template <typename T, typename Out>
struct CompactWeightsJob : WeightsJob<T, Out, CompactBackward> {
  using WeightsJob<T, Out, CompactBackward>::b;
  __device__ __forceinline__ explicit CompactWeightsJob(const CompactBackward& pass)
      : WeightsJob<T, Out, CompactBackward>{pass} {}
  __device__ __forceinline__ bool is_needless() const { return needs_no_products(b); }
};

// dx of `count` blocks from `first` on, rows and neurons in their own order. The arena has [blocks][2][panels] panels.
template <typename T>
struct DenseDxJob : DxJob<T, CompactBackward> {
  using DxJob<T, CompactBackward>::b;
  __device__ __forceinline__ explicit DenseDxJob(const CompactBackward& pass) : DxJob<T, CompactBackward>{pass} {}
  __device__ __forceinline__ bool is_needless() const { return needs_no_passes(b); }
  __device__ __forceinline__ int items() const { return b.count; }
  __device__ __forceinline__ int steps(int) const { return 2 * b.panels; }
  __device__ __forceinline__ const void* panel(int item, int, int step, int) const {
    return static_cast<const unsigned char*>(b.panels_of_rows) +
           (static_cast<int64_t>(item) * 2 * b.panels + step) * kPanelBytes;
  }
  __device__ __forceinline__ int row(int, int step, int place) const {
    const int neuron = (step < b.panels ? step : step - b.panels) * kPanelColumns + place;
    return neuron < b.d_ff ? neuron : -1;
  }
  template <int kN>
  __device__ __forceinline__ void write(float (&d)[128], Shared& s, const SharedPiece& piece, const Consumer& c) const {
    const int first = (b.first + piece.item) * kBlockRows + c.group * 64 + c.warp * 16;
    write_dx<T, kN>(b, d, s, piece, c, [&](int r) { return first + r; });
  }
};

// The weights' gradients of `count` groups of 64 neurons from `first` on, likewise. The arena has [groups][2 * blocks]
// chunks. Rows that are not finite add nothing.
template <typename T, typename Out>
struct DenseWeightsJob : WeightsJob<T, Out, CompactBackward> {
  using WeightsJob<T, Out, CompactBackward>::b;
  __device__ __forceinline__ explicit DenseWeightsJob(const CompactBackward& pass)
      : WeightsJob<T, Out, CompactBackward>{pass} {}
  __device__ __forceinline__ bool is_needless() const { return needs_no_passes(b); }
  __device__ __forceinline__ int items() const { return b.count; }
  __device__ __forceinline__ int steps(int) const { return chunks_of(b.rows); }
  __device__ __forceinline__ const void* panel(int item, int column, int step, int) const {
    const int64_t chunk = static_cast<int64_t>(item) * b.blocks * (kBlockRows / kChunk) + step;
    return static_cast<const uint16_t*>(b.chunks) + chunk * kChunkValues +
           (this->is_light(column) ? 2 * kListNeurons * kChunk : 0);
  }
  __device__ __forceinline__ int row(int, int step, int place) const {
    const int row = step * kChunk + place;
    return row < b.rows && b.finite[row] ? row : -1;
  }
  __device__ __forceinline__ int neuron(int item, int r) const {
    const int of = (b.first + item) * kListNeurons + r;
    return of < b.d_ff ? of : -1;
  }
  template <int kN>
  __device__ __forceinline__ void write(float (&d)[128], Shared& s, const SharedPiece& piece, const Consumer& c) const {
    const bool light = this->is_light(piece.column);
    Out* const matrix = static_cast<Out*>(light ? b.d_down : c.group == 0 ? b.d_up : b.d_gate);
    const int n0 = this->first_output(piece.column) + (light ? c.column0 : 0);
    write_rows<T, Out, kN>(
        d, s, c, n0, b.d_model,
        [&](int r) {
          const int of = neuron(piece.item, c.warp * 16 + r);
          return of >= 0 ? matrix + static_cast<int64_t>(of) * b.d_model : nullptr;
        },
        light ? b.adds_down : b.adds);
  }
};

}  // namespace twell::hopper
