// What the kernels of fewer rows share: a ring of stages of any size and number, and the product over what streams through it.
#pragma once

#include "hopper/gemm.cuh"

namespace twell::hopper {

// A ring of stages in shared memory, and where a thread stands in it.
struct Stages {
  unsigned char* base;
  uint64_t *full, *empty;
  int count, bytes;
  uint32_t phase;
  int at = 0;
  __device__ __forceinline__ unsigned char* here() const { return base + at * bytes; }
  __device__ __forceinline__ void next() {
    if (++at == count) at = 0, phase ^= 1;
  }
};

// D[64 x kN] = A B^T over `stages` stages, of each of which this warpgroup takes kSteps times 16 of k, A and B at their offsets, once
// ready(stage, phase) comes back; release(stage), by whole warps, once a stage's products are done. kByNeuron: both operands lie
// [k][64], otherwise [64][k] and [kN][k].
template <typename T, int kN, int kSteps, int kByNeuron, int kSize, typename Ready, typename Release>
__device__ __forceinline__ void multiply(float (&d)[kSize], Stages& s, int stages, int a_at, int b_at, Ready ready, Release release) {
  constexpr uint32_t kStep = kByNeuron ? 2048 >> 4 : 32 >> 4;
  int last = -1;
  for (int i = 0; i < stages; ++i) {
    ready(s.at, s.phase);
    const uint64_t a = descriptor(s.here() + a_at, 8192, 1024), b = descriptor(s.here() + b_at, 8192, 1024);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) wgmma<T, kN, kByNeuron, kByNeuron>(d, a + k * kStep, b + k * kStep, i > 0 || k > 0);
    wgmma_commit();
    if (last >= 0) {
      wgmma_wait<1>();
      release(last);
    }
    last = s.at;
    s.next();
  }
  wgmma_wait<0>();
  if (last >= 0) release(last);
}

}  // namespace twell::hopper
