// The down product: y = h Wd^T + b over each block's union, whose rows of Wd (by neuron) are gathered step by step.
#pragma once

#include "cuda/product.cuh"

namespace twell::cuda {

template <typename S>
struct DownTile {
  int block, n0, size;
  const int* list;  // [size]
  __device__ __forceinline__ DownTile(const Ffn& f, int t) {
    const int wide = (f.d_model + S::kN - 1) / S::kN;
    block = t / wide, n0 = t % wide * S::kN;
    size = f.sizes[block], list = f.lists + static_cast<int64_t>(block) * f.d_ff;
  }
  __device__ __forceinline__ int steps() const { return (size + S::kK - 1) / S::kK; }
};

// A thread copies one chunk of every kEvery-th neuron of a step; it looks up the next step's neurons while this one's
// are copied. Past the union it copies the last neuron again, which is multiplied by zeros of the hidden state.
template <typename T, typename S>
struct DownFill {
  static constexpr int kChunks = S::kN / 8, kEvery = S::kThreads / kChunks, kMine = S::kK / kEvery;
  static_assert(S::kK % kEvery == 0 && kEvery % 8 == 0);
  const Ffn& f;
  Rows<T, S, S::kM> hidden;
  const int* list;
  const T* w;   // the thread's eight columns
  bool inside;  // they exist; else zeros
  int last, next[kMine];
  uint32_t place;

  __device__ __forceinline__ void look(int step) {
    const int first = step * S::kK + static_cast<int>(threadIdx.x) / kChunks;
#pragma unroll
    for (int i = 0; i < kMine; ++i) next[i] = list[min(first + i * kEvery, last)];
  }
  __device__ __forceinline__ void aim(const DownTile<S>& tile) {
    hidden.aim(f.d_ff, S::kM, [&](int r) { return tile.block * S::kM + r; });
    const int chunk = threadIdx.x % kChunks, column = tile.n0 + 8 * chunk;
    inside = column < f.d_model, w = static_cast<const T*>(f.w_down) + (inside ? column : 0);
    list = tile.list, last = max(tile.size - 1, 0), place = chunk_place<kChunks>(threadIdx.x / kChunks, chunk);
    if (tile.size > 0) look(0);
  }
  __device__ __forceinline__ void operator()(int step, uint32_t a, uint32_t b) {
    hidden.copy(a, f.hidden, step, last + 1);
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      copy_16(b + place + i * kEvery * S::kN * 2, w + static_cast<int64_t>(next[i]) * f.d_model, inside);
    look(step + 1);
  }
};

template <typename T, typename S>
__device__ __forceinline__ void finish_down(Sum<S>& d, const Ffn& f, const DownTile<S>& tile) {
  const Place<S> p;
  const T* bias = static_cast<const T*>(f.b_down);
#pragma unroll
  for (int i = 0; i < S::kWarpM / 16; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile.block * S::kM + p.row + 16 * i + 8 * h;
      if (row >= f.rows) continue;
      const bool whole = f.finite[row];
      T* y = static_cast<T*>(f.y) + static_cast<int64_t>(row) * f.d_model;
#pragma unroll
      for (int j = 0; j < S::kWarpN / 8; ++j) {
        const int column = tile.n0 + p.column + 8 * j;
        if (column >= f.d_model) continue;
        float low = d[i][j][2 * h], high = d[i][j][2 * h + 1];
        if (bias != nullptr) low += static_cast<float>(bias[column]), high += static_cast<float>(bias[column + 1]);
        *reinterpret_cast<uint32_t*>(y + column) = whole ? round_pair<T>(low, high) : kNanPair;
      }
    }
}

template <typename T, typename S>
__global__ void __launch_bounds__(S::kThreads, S::kCtas) down(const Ffn f, int total) {
  extern __shared__ __align__(128) unsigned char raw[];
  const uint32_t shared = smem_address(raw);
  const Place<S> p;
  DownFill<T, S> fill{f};
  Sum<S> d;
  int t = blockIdx.x;
  const auto begin = [&] {
    const DownTile<S> tile(f, t);
    fill.aim(tile);
    start<S>(shared, tile.steps(), fill);
  };
  begin();
  while (true) {
    const DownTile<S> tile(f, t);
    multiply<T, S, true>(d, shared, tile.steps(), tile.n0 + p.column0 >= f.d_model, fill);
    t += gridDim.x;
    if (t < total) {  // its first stages fill during this tile's epilogue
      __syncthreads();
      begin();
    }
    finish_down<T, S>(d, f, tile);
    if (t >= total) return;
  }
}

}  // namespace twell::cuda
