// What the launchers share: tensor maps, checks, and the number of multiprocessors.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "hopper/gemm.cuh"

namespace twell::hopper {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// A row-major matrix [height, width] of T, copied in boxes of [box_height, 64], zeros outside, that lie 128-byte swizzled in
// shared memory, or as they lie outside.
template <typename T>
CUtensorMap tensor_map(const void* matrix, int height, int width, int box_height, bool swizzled = true) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  constexpr auto kType =
      std::is_same_v<T, __nv_bfloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  CUtensorMap map;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(height)};
  const cuuint64_t strides[] = {sizes[0] * sizeof(T)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_height)}, every[] = {1, 1};
  const CUresult result = encode(&map, kType, 2, const_cast<void*>(matrix), sizes, strides, box, every,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw std::runtime_error("tensor map: the driver answers " + std::to_string(result));
  return map;
}

inline int multiprocessors() {
  int device, count;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  return count;
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, cudaStream_t stream, const Arguments&... arguments) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "shared memory");
  kernel<<<grid, threads, shared, stream>>>(arguments...);
  check(cudaGetLastError(), "launch");
}

}  // namespace twell::hopper
