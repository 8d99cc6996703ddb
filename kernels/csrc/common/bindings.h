// What the bindings of CUDA kernels share: tensors as addresses, the stream, the type of the values, and where counts go.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cuda_runtime.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/probes.h"

struct __nv_bfloat16;
struct __half;

namespace twell {

using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;
using Places = std::vector<int64_t>;  // where the parts of a workspace begin, in bytes from its address
using DeviceGuard = torch::stable::accelerator::DeviceGuard;

inline void* address(const Tensor& tensor) { return tensor.data_ptr(); }
inline void* address(const Maybe& tensor) { return tensor ? tensor->data_ptr() : nullptr; }

// From a value on; null of no tensor.
template <typename T, typename Any>
T* as(const Any& tensor, int64_t at = 0) {
  T* const first = static_cast<T*>(address(tensor));
  return first == nullptr ? nullptr : first + at;
}

// The tensor at an address that copies of 16 bytes take.
inline Tensor aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(address(tensor)) % 16 == 0 ? tensor : torch::stable::clone(tensor);
}
inline Maybe aligned(const Maybe& tensor) { return tensor ? Maybe(aligned(*tensor)) : tensor; }

// The values of w_down [d_model, d_ff] in the order of neurons: a copy, unless that is how they are held.
inline Tensor by_neuron(const Tensor& w_down) {
  return aligned(w_down.stride(0) == 1 ? w_down : torch::stable::contiguous(torch::stable::transpose(w_down, 0, 1)));
}

// Points each part of a workspace to its place in it.
template <typename... Part>
void point(const Tensor& workspace, const Places& places, Part*&... parts) {
  if (places.size() != sizeof...(Part)) throw std::runtime_error("places: expected " + std::to_string(sizeof...(Part)));
  auto place = places.begin();
  ((parts = reinterpret_cast<Part*>(as<char>(workspace, *place++))), ...);
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

// From a row on.
inline Counts counts_of(int64_t row, const Maybe& counted, const Maybe& tokens, const Maybe& sequences, const Maybe& nnz,
                        const Maybe& pairs, const Maybe& fullest, const Maybe& fires, const Maybe& value_sum,
                        const Maybe& value_max, const Maybe& token_min, const Maybe& token_max, const Maybe& first_sequence) {
  using Sum = unsigned long long;
  return {as<uint8_t>(counted, row),
          as<int>(tokens, row),
          as<int>(sequences, row),
          as<int>(nnz, row),
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
