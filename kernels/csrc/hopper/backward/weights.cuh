// Gradients of the weights: for each group of 64 neurons, [du | dg] times its tokens' rows of x, and h times their rows
// of dy.
//
// du and dg share what is gathered of x: each warpgroup takes one of them. Of h, each warpgroup takes half of the
// outputs.
#pragma once

#include "hopper/backward/gathered_product.cuh"
#include "hopper/backward/token_lists.cuh"

namespace twell::hopper {

template <typename T, typename Out, typename PassOf = Backward>
struct WeightsJob {
  using Value = T;
  using Pass = PassOf;
  const Pass& b;

  __device__ __forceinline__ bool is_needless() const { return false; }
  __device__ __forceinline__ int d_model() const { return b.d_model; }
  __device__ __forceinline__ int items() const { return b.panels; }
  // Columns of outputs in a phase: of [du | dg] x in the first one, of h dy in the second.
  __device__ __forceinline__ int columns() const { return (b.d_model + kTileN - 1) / kTileN; }
  __device__ __forceinline__ int phases() const { return 2; }
  __device__ __forceinline__ bool is_light(int column) const { return column >= columns(); }
  __device__ __forceinline__ int first_output(int column) const { return column % columns() * kTileN; }
  __device__ __forceinline__ int steps(int group) const { return chunks_of(b.token_counts[group]); }
  __device__ __forceinline__ int panel_bytes(int column) const { return is_light(column) ? kABytes / 2 : kABytes; }
  __device__ __forceinline__ const void* panel(int group, int column, int step, int) const {
    return static_cast<const uint16_t*>(b.chunks) + chunk_at(b, group, step) +
           (is_light(column) ? 2 * kListNeurons * kChunk : 0);
  }
  __device__ __forceinline__ const void* matrix(int column, int, int) const { return is_light(column) ? b.dy : b.x; }
  __device__ __forceinline__ int row(int group, int step, int place) const {
    return b.tokens[static_cast<int64_t>(group) * b.blocks * kBlockRows + step * kChunk + place];
  }
  // The r-th neuron of a group, or -1.
  __device__ __forceinline__ int neuron(int group, int r) const {
    const int rank = group * kListNeurons + r;
    return rank < b.d_ff ? b.neuron_at[rank] : -1;
  }
  template <int kN>
  __device__ __forceinline__ void write(float (&d)[128], Shared& s, const SharedPiece& piece, const Consumer& c) const {
    const bool light = is_light(piece.column);
    Out* const matrix = static_cast<Out*>(light ? b.d_down : c.group == 0 ? b.d_up : b.d_gate);
    const int n0 = first_output(piece.column) + (light ? c.column0 : 0);
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
