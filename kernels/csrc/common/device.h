// What launchers and bindings need from the CUDA runtime: error checks and the number of multiprocessors.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace twell {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline int multiprocessors() {
  int device, count;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  return count;
}

}  // namespace twell
