// Addresses in shared memory, as instructions take them.
#pragma once

#include <stdint.h>

namespace twell {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace twell
