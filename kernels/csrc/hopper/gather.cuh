// The producers of `up` and `down`: copies into the ring by threads, two stages in flight, beside the copy engine's.
#pragma once

#include "hopper/gemm.cuh"

namespace twell::hopper {

// A stage is full after the copy engine's bytes and one arrival of each producer warp.
__device__ __forceinline__ void begin_ring(Shared& s) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      barrier_init(&s.full[i], 1 + kProducerWarps), barrier_init(&s.empty[i], kConsumerWarps);
    barrier_init(&s.staged[0], 1), barrier_init(&s.staged[1], 1);
    fence_barrier_init();
  }
  __syncthreads();
}

// Says that a stage is full once its copies have landed, a stage late.
struct Filler {
  int last = -1;  // the stage whose copies were committed before
  template <int kLeft>
  __device__ __forceinline__ void arrive(Shared& s) {
    if (last < 0) return;
    async_wait<kLeft>();
    fence_async_proxy();  // the copies went through the generic proxy; the tensor cores read through the other
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.full[last]);
  }
  __device__ __forceinline__ void commit(Shared& s, int stage) {
    async_commit();
    arrive<1>(s);
    last = stage;
  }
};

}  // namespace twell::hopper
