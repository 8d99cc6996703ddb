// The up product over each block's union, and the hidden state: h = g > 0 ? g * (x Wu^T + b) : 0, in place of the
// values g.
//
// A task is a block and a tile of its union. The plan lists the tasks, since their number depends on the data.
#pragma once

#include "cuda/product.cuh"

namespace twell::cuda {

template <typename S>
struct UpTask {
  int block, first, columns;  // the block, and its union from `first` on
  const int* list;            // [columns]
  __device__ __forceinline__ UpTask(const Ffn& f, int t) {
    const int2 task = reinterpret_cast<const int2*>(f.tasks)[1 + t];
    block = task.x, first = task.y * S::kN;
    columns = min(S::kN, f.sizes[block] - first);
    list = f.lists + static_cast<int64_t>(block) * f.d_ff + first;
  }
};

template <typename T, typename S>
struct UpFill {
  const Ffn& f;
  Rows<T, S, S::kM> x;
  Rows<T, S, S::kN> w;
  __device__ __forceinline__ void aim(const UpTask<S>& task) {
    const int m0 = task.block * S::kM;
    x.aim(f.d_model, f.rows - m0, [&](int r) { return m0 + r; });
    w.aim(f.d_model, task.columns, [&](int r) { return task.list[r]; });
  }
  __device__ __forceinline__ void operator()(int step, uint32_t a, uint32_t b) const {
    x.copy(a, f.x, step, f.d_model), w.copy(b, f.w_up, step, f.d_model);
  }
};

template <typename T, typename S, bool kUpRelu>
__device__ __forceinline__ void finish_up(Sum<S>& d, const Ffn& f, const UpTask<S>& task) {
  const Place<S> p;
  const T* bias = static_cast<const T*>(f.b_up);
#pragma unroll
  for (int i = 0; i < S::kWarpM / 16; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = task.block * S::kM + p.row + 16 * i + 8 * h;
      T* from = static_cast<T*>(f.hidden) + static_cast<int64_t>(row) * f.d_ff + task.first + p.column;
      uint32_t* hidden = reinterpret_cast<uint32_t*>(from);
      uint32_t gates[S::kWarpN / 8];
#pragma unroll
      for (int j = 0; j < S::kWarpN / 8; ++j) gates[j] = p.column + 8 * j < task.columns ? hidden[4 * j] : 0;
      float peak = 0.f;
      int used = 0;
#pragma unroll
      for (int j = 0; j < S::kWarpN / 8; ++j) {
        if (gates[j] == 0) continue;
        float out[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float g = half_of<T>(gates[j], e);
          float u = d[i][j][2 * h + e];
          if (bias != nullptr && g > 0.f) u += static_cast<float>(bias[task.list[p.column + 8 * j + e]]);
          if constexpr (kUpRelu) u = max_nan(u, 0.f), used += g > 0.f && u > 0.f;
          out[e] = g > 0.f ? g * u : 0.f;
          peak = max_nan(peak, fabsf(out[e]));
        }
        hidden[4 * j] = round_pair<T>(out[0], out[1]);
      }
      if (row < f.rows && !stays_finite<T>(peak)) f.finite[row] = 0;
      if constexpr (kUpRelu) {
        used += __shfl_xor_sync(~0u, used, 1);
        used += __shfl_xor_sync(~0u, used, 2);
        if (f.used != nullptr && row < f.rows && (p.lane & 3) == 0 && used > 0) atomicAdd(&f.used[row], used);
      }
    }
}

template <typename T, typename S, bool kUpRelu>
__global__ void __launch_bounds__(S::kThreads, S::kCtas) up(const Ffn f) {
  extern __shared__ __align__(128) unsigned char raw[];
  const uint32_t shared = smem_address(raw);
  const int total = f.tasks[0], steps = (f.d_model + S::kK - 1) / S::kK;
  int t = blockIdx.x;
  if (t >= total) return;
  const Place<S> p;
  UpFill<T, S> fill{f};
  Sum<S> d;
  fill.aim(UpTask<S>(f, t));
  start<S>(shared, steps, fill);
  while (true) {
    multiply<T, S, false>(d, shared, steps, p.column0 >= UpTask<S>(f, t).columns, fill);
    const UpTask<S> task(f, t);
    t += gridDim.x;
    if (t < total) {  // its first stages fill during this tile's epilogue
      __syncthreads();
      fill.aim(UpTask<S>(f, t));
      start<S>(shared, steps, fill);
    }
    finish_up<T, S, kUpRelu>(d, f, task);
    if (t >= total) return;
  }
}

}  // namespace twell::cuda
