// What the bindings of CUDA kernels share: tensors as addresses, the stream, the type of the values, and where counts go.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cuda_runtime.h>

#include <optional>

#include "common/counts.h"

struct __nv_bfloat16;
struct __half;

namespace twell {

using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;
using DeviceGuard = torch::stable::accelerator::DeviceGuard;

inline void* address(const Tensor& tensor) { return tensor.data_ptr(); }
inline void* address(const Maybe& tensor) { return tensor ? tensor->data_ptr() : nullptr; }

template <typename T, typename Any>
T* as(const Any& tensor) {
  return static_cast<T*>(address(tensor));
}

inline cudaStream_t stream_of(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// run.operator()<T>(), T as the values of x.
template <typename Run>
void by_type(const Tensor& x, const Run& run) {
  if (x.scalar_type() == torch::headeronly::ScalarType::BFloat16)
    run.template operator()<__nv_bfloat16>();
  else
    run.template operator()<__half>();
}

inline Counts counts_of(const Maybe& counted, const Maybe& tokens, const Maybe& sequences, const Maybe& nnz, const Maybe& pairs,
                        const Maybe& fullest, const Maybe& fires, const Maybe& value_sum, const Maybe& value_max,
                        const Maybe& token_min, const Maybe& token_max, const Maybe& first_sequence) {
  using Sum = unsigned long long;
  return {as<uint8_t>(counted),
          as<int>(tokens),
          as<int>(sequences),
          as<int>(nnz),
          as<Sum>(pairs),
          as<Sum>(fullest),
          as<Sum>(fires),
          as<Sum>(value_sum),
          as<float>(value_max),
          as<int>(token_min),
          as<int>(token_max),
          as<uint32_t>(first_sequence)};
}

}  // namespace twell
