// Addresses in shared memory, as instructions take them.
#pragma once

#include <stdint.h>

namespace twell {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A number that all lanes of the warp have in common, in a uniform register: what depends on it is computed once a
// warp, branches on it do not diverge, and it is kept in the register, where an address of shared memory would be
// recomputed at each use.
__device__ __forceinline__ uint32_t uniform(uint32_t value) { return __reduce_or_sync(~0u, value); }
__device__ __forceinline__ int uniform(int value) { return static_cast<int>(uniform(static_cast<uint32_t>(value))); }

// The same object in shared memory, through such an address; otherwise the address would be recomputed, in ten
// instructions, at each use of a barrier or stage. For whole warps.
template <typename T>
__device__ __forceinline__ T* in_register(T* shared) {
  return static_cast<T*>(__cvta_shared_to_generic(uniform(smem_address(shared))));
}

}  // namespace twell
