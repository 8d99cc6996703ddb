// The gate product, z = x Wg^T + b. Its epilogue writes what fired: a bit a neuron, and the values of every eight
// neurons of which one fired. It writes nothing else, so sparse rows cost little memory traffic, and no row is too
// dense.
#pragma once

#include "cuda/product.cuh"

namespace twell::cuda {

// Tiles are taken kGroup at a time down the rows before the next neurons, so that the rows and weights in use stay in
// the L2 cache.
template <typename S>
struct GateTile {
  static constexpr int kGroup = 16;
  int m0, n0;
  __device__ __forceinline__ GateTile(const Ffn& f, int t) {
    const int wide = (f.d_ff + S::kN - 1) / S::kN, group = t / (kGroup * wide), at = t % (kGroup * wide);
    const int high = min(kGroup, (f.rows + S::kM - 1) / S::kM - group * kGroup);
    m0 = (group * kGroup + at % high) * S::kM, n0 = at / high * S::kN;
  }
};

template <typename T, typename S>
struct GateFill {
  const Ffn& f;
  Rows<T, S, S::kM> x;
  Rows<T, S, S::kN> w;
  __device__ __forceinline__ void aim(const GateTile<S>& tile) {
    x.aim(f.d_model, f.rows - tile.m0, [&](int r) { return tile.m0 + r; });
    w.aim(f.d_model, f.d_ff - tile.n0, [&](int r) { return tile.n0 + r; });
  }
  __device__ __forceinline__ void operator()(int step, uint32_t a, uint32_t b) const {
    x.copy(a, f.x, step, f.d_model), w.copy(b, f.w_gate, step, f.d_model);
  }
};

// Writes a tile's masks and values, and marks rows that are not finite.
template <typename T, typename S, bool kRelu2>
__device__ __forceinline__ void finish_gate(Sum<S>& d, const Ffn& f, const GateTile<S>& tile) {
  // columns at a time: a word of the mask, or half a word
  constexpr int kBits = S::kWarpN < 32 ? S::kWarpN : 32, kNi = kBits / 8;
  using Bits = std::conditional_t<kBits == 32, uint32_t, uint16_t>;
  const Place<S> p;
  const T* bias = static_cast<const T*>(f.b_gate);
#pragma unroll
  for (int i = 0; i < S::kWarpM / 16; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile.m0 + p.row + 16 * i + 8 * h;
      float broken = 0.f, peak = 0.f;  // inf or NaN times 0 is NaN, and NaN persists
#pragma unroll
      for (int w = 0; w < S::kWarpN / kBits; ++w) {
        const int column0 = tile.n0 + p.column0 + w * kBits;
        uint32_t bits = 0, pairs[kNi];
#pragma unroll
        for (int j = 0; j < kNi; ++j) {
          float value[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int at = 8 * j + 2 * (p.lane & 3) + e, column = column0 + at;
            float z = column < f.d_ff ? d[i][w * kNi + j][2 * h + e] : 0.f;
            if (bias != nullptr && column < f.d_ff) z += static_cast<float>(bias[column]);
            broken = fmaf(z, 0.f, broken);
            const bool fired = z > 0.f;
            value[e] = fired ? fmaxf(kRelu2 ? z * z : z, kLeast<T>) : 0.f;
            peak = fmaxf(peak, value[e]);
            bits |= static_cast<uint32_t>(fired) << at;
          }
          pairs[j] = round_pair<T>(value[0], value[1]);
        }
        bits |= __shfl_xor_sync(~0u, bits, 1);
        bits |= __shfl_xor_sync(~0u, bits, 2);
        if (row < f.rows && column0 < 32 * f.words) {
          if ((p.lane & 3) == 0)
            reinterpret_cast<Bits*>(f.masks + static_cast<int64_t>(row) * f.words)[column0 / kBits] =
                static_cast<Bits>(bits);
          T* values = static_cast<T*>(f.values) + static_cast<int64_t>(row) * f.pitch + column0 + 2 * (p.lane & 3);
#pragma unroll
          for (int j = 0; j < kNi; ++j)
            if (bits >> (8 * j) & 0xffu) *reinterpret_cast<uint32_t*>(values + 8 * j) = pairs[j];
        }
      }
      if (row < f.rows && (broken != 0.f || !stays_finite<T>(peak))) f.finite[row] = 0;
    }
  }
}

template <typename T, typename S, bool kRelu2>
__global__ void __launch_bounds__(S::kThreads, S::kCtas) gate(const Ffn f, int total) {
  extern __shared__ __align__(128) unsigned char raw[];
  const uint32_t shared = smem_address(raw);
  const int steps = (f.d_model + S::kK - 1) / S::kK;
  if (blockIdx.x == 0 && threadIdx.x == 0) f.tasks[0] = 0;  // the plan, the next launch, counts up from here
  GateFill<T, S> fill{f};
  Sum<S> d;
  int t = blockIdx.x;
  fill.aim(GateTile<S>(f, t));
  start<S>(shared, steps, fill);
  while (true) {
    multiply<T, S, false>(d, shared, steps, false, fill);
    const GateTile<S> tile(f, t);
    t += gridDim.x;
    if (t < total) {  // its first stages fill during this tile's epilogue
      __syncthreads();
      fill.aim(GateTile<S>(f, t));
      start<S>(shared, steps, fill);
    }
    finish_gate<T, S, kRelu2>(d, f, tile);
    if (t >= total) return;
  }
}

}  // namespace twell::cuda
