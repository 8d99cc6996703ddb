// One CTA reads one row once.
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "predictions/partial.cuh"
#include "predictions/predictions.h"

namespace twell::predictions {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    loss_and_entropy(const uint4* logits, const int64_t* ids, float* out, int64_t rows, int columns) {
  __shared__ Partial of_warps[kWarps];
  const int64_t row = blockIdx.x;
  const uint4* line = logits + row * (columns / 8);
  Partial mine;
#pragma unroll 2
  for (int i = threadIdx.x; i < columns / 8; i += kThreads) {
    const uint4 unit = line[i];
    float x[8], most = -INFINITY;
    int at = 0;
    for (const uint32_t pair : {unit.x, unit.y, unit.z, unit.w})
      x[at++] = half_of<T>(pair, 0), x[at++] = half_of<T>(pair, 1);
#pragma unroll
    for (const float value : x) most = fmaxf(most, value);
    if (most > mine.most) mine.raise(most);
#pragma unroll
    for (const float value : x) mine.add(value);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
    mine.merge({__shfl_xor_sync(~0u, mine.most, step), __shfl_xor_sync(~0u, mine.sum, step),
                __shfl_xor_sync(~0u, mine.weighted, step)});
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kWarps; ++warp) mine.merge(of_warps[warp]);
  const uint16_t bits = reinterpret_cast<const uint16_t*>(line)[ids[row]];
  out[row] = mine.loss(half_of<T>(bits, 0)), out[rows + row] = mine.entropy();
}

}  // namespace

template <typename T>
void launch(const void* logits, const int64_t* ids, float* out, int64_t rows, int columns, void* stream) {
  if (rows > 0)
    twell::launch(loss_and_entropy<T>, static_cast<unsigned>(rows), kThreads, 0, static_cast<cudaStream_t>(stream),
                  static_cast<const uint4*>(logits), ids, out, rows, columns);
}

template void launch<__nv_bfloat16>(const void*, const int64_t*, float*, int64_t, int, void*);
template void launch<__half>(const void*, const int64_t*, float*, int64_t, int, void*);

}  // namespace twell::predictions
