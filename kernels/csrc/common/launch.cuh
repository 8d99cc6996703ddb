// What launchers share: checks, shared memory, and a plain launch.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "common/device.h"

namespace twell {

// Lets a kernel have so many bytes of shared memory. What it was allowed once it keeps: another thread may be about to launch it with more.
template <typename... Parameters>
void allow_shared(void (*kernel)(Parameters...), int bytes) {
  static std::mutex mutex;
  static std::map<std::pair<decltype(kernel), int>, int> allowed;  // of a kernel, on a device
  int device;
  check(cudaGetDevice(&device), "device");
  const std::lock_guard guard(mutex);
  int& most = allowed[{kernel, device}];
  if (bytes <= most) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory");
  most = bytes;
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, cudaStream_t stream, const Arguments&... arguments) {
  if (shared > 48 * 1024) allow_shared(kernel, shared);
  kernel<<<grid, threads, shared, stream>>>(arguments...);
  check(cudaGetLastError(), "launch");
}

}  // namespace twell
