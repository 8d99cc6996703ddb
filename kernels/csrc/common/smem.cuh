// Addresses in shared memory, as instructions take them.
#pragma once

#include <stdint.h>

namespace twell {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A number that all lanes of the warp have, in a register that the warp shares: what follows from it is worked out once a warp, branches
// on it part no lanes, and it is kept, where an address of shared memory would be worked out anew at each use.
__device__ __forceinline__ uint32_t uniform(uint32_t value) { return __reduce_or_sync(~0u, value); }
__device__ __forceinline__ int uniform(int value) { return static_cast<int>(uniform(static_cast<uint32_t>(value))); }

// The same place of shared memory, by such an address: otherwise it would be worked out anew, in ten instructions, wherever a barrier or a
// stage is named. By whole warps.
template <typename T>
__device__ __forceinline__ T* in_register(T* shared) {
  return static_cast<T*>(__cvta_shared_to_generic(uniform(smem_address(shared))));
}

}  // namespace twell
