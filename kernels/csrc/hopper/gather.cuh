// The producers of `up` and `down`: asynchronous copies into the ring by threads, beside those of the copy engine.
#pragma once

#include "hopper/gemm.cuh"

namespace twell::hopper {

// A stage is full once the copy engine's bytes and the copies of each producer thread have arrived; a warpgroup's half
// of the staging tile, once the copies of its warps have.
__device__ __forceinline__ void begin_ring(Shared& s, int consumers = kConsumers) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&s.full[i], 1 + kProducers), barrier_init(&s.empty[i], consumers);
    barrier_init(&s.staged[0], kConsumerWarps / 2), barrier_init(&s.staged[1], kConsumerWarps / 2);
    fence_barrier_init();
  }
  __syncthreads();
}

constexpr int kProducerBarrier = 3;  // its number; the consumer warpgroups have two of their own

// The address this many bytes further.
template <typename T>
__device__ __forceinline__ const void* bytes_on(const T* base, uint64_t bytes) {
  return reinterpret_cast<const unsigned char*>(base) + bytes;
}

}  // namespace twell::hopper
