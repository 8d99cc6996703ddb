#include "hopper/backward/whole_calls/totals.h"

#include "common/launch.cuh"

namespace twell::hopper {

constexpr int kTotalThreads = 512;

// The first CTA adds up, in an order that its threads alone set; each further one has kTotalThreads neurons to copy.
static __global__ void __launch_bounds__(kTotalThreads) add_totals(const Totals t) {
  __shared__ float sums[kTotalThreads];
  __shared__ int counts[kTotalThreads];
  const int thread = threadIdx.x;
  if (blockIdx.x > 0) {
    const int neuron = (static_cast<int>(blockIdx.x) - 1) * kTotalThreads + thread;
    if (neuron < t.d_ff) t.wide_fires[neuron] = t.fires[neuron];
    return;
  }
  float sum = 0.f;
  int count = 0;
#pragma unroll 4
  for (int i = thread; i < t.parts; i += kTotalThreads) sum += t.l1_parts[i];
#pragma unroll 8
  for (int row = thread; row < t.rows; row += kTotalThreads)
    count += t.finite[row] != 0 && (t.counted == nullptr || t.counted[row] != 0);
  sums[thread] = sum, counts[thread] = count;
  for (int half = kTotalThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half], counts[thread] += counts[thread + half];
  }
  if (thread > 0) return;
  const float many = counts[0] > 1 ? static_cast<float>(counts[0]) : 1.f;
  *t.counted_rows = many;
  *t.l1 = sums[0] / many;
}

static __global__ void scale_l1(const float* gradient, const float* counted_rows, float* scale) {
  *scale = gradient == nullptr ? 0.f : *gradient / *counted_rows;
}

void launch_totals(const Totals& totals, cudaStream_t stream) {
  launch(add_totals, 1 + (totals.d_ff + kTotalThreads - 1) / kTotalThreads, kTotalThreads, 0, stream, totals);
}

void launch_scale(const float* gradient, const float* counted_rows, float* scale, cudaStream_t stream) {
  launch(scale_l1, 1, 1, 0, stream, gradient, counted_rows, scale);
}

}  // namespace twell::hopper
