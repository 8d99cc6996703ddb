// The producers of `up` and `down`: copies into the ring by threads, beside the copy engine's, all of them asynchronous.
#pragma once

#include "hopper/gemm.cuh"

namespace twell::hopper {

// A stage is full after the copy engine's bytes, and after the copies of each producer thread; a warpgroup's half of the staging tile
// after those of its warps.
__device__ __forceinline__ void begin_ring(Shared& s) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&s.full[i], 1 + kProducers), barrier_init(&s.empty[i], kConsumers);
    barrier_init(&s.staged[0], kConsumerWarps / 2), barrier_init(&s.staged[1], kConsumerWarps / 2);
    fence_barrier_init();
  }
  __syncthreads();
}

constexpr int kProducerBarrier = 3;  // its number; the consumer warpgroups have two of their own

// So many bytes on.
template <typename T>
__device__ __forceinline__ const void* bytes_on(const T* base, uint64_t bytes) {
  return reinterpret_cast<const unsigned char*>(base) + bytes;
}

}  // namespace twell::hopper
