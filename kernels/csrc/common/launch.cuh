// What launchers share: error checks, shared memory, and a plain launch.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "common/device.h"

namespace twell {

// Allows a kernel this many bytes of shared memory. A larger limit that was set before stays, since another thread may
// be about to launch the kernel with more. beside_others: a multiprocessor that runs it has all the shared memory that
// there can be, so that CTAs of other kernels fit beside; else as much as this kernel needs.
template <typename... Parameters>
void allow_shared(void (*kernel)(Parameters...), int bytes, bool beside_others = false) {
  static std::mutex mutex;
  static std::map<std::pair<decltype(kernel), int>, int> allowed;  // by kernel and device
  int device;
  check(cudaGetDevice(&device), "device");
  const std::lock_guard guard(mutex);
  int& most = allowed[{kernel, device}];
  if (bytes <= most) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory");
  if (beside_others)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
          "shared memory");
  most = bytes;
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, cudaStream_t stream,
            const Arguments&... arguments) {
  if (shared > 48 * 1024) allow_shared(kernel, shared);
  kernel<<<grid, threads, shared, stream>>>(arguments...);
  check(cudaGetLastError(), "launch");
}

}  // namespace twell
