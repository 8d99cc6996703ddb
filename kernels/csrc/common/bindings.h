// What the bindings of CUDA kernels share: tensors as addresses, the stream, the type of the values, and the arguments
// that all ops have.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cuda_runtime.h>

#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/arguments.h"
#include "common/device.h"
#include "common/probes.h"
#include "common/stages.h"

struct __nv_bfloat16;
struct __half;

namespace twell {

using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;
using Offsets = std::vector<int64_t>;  // of the buffers in a workspace, in bytes from its address
using DeviceGuard = torch::stable::accelerator::DeviceGuard;

inline void* address(const Tensor& tensor) { return tensor.data_ptr(); }
inline void* address(const Maybe& tensor) { return tensor ? tensor->data_ptr() : nullptr; }

// The address of a tensor's at-th value; null without a tensor.
template <typename T, typename Any>
T* as(const Any& tensor, int64_t at = 0) {
  T* const first = static_cast<T*>(address(tensor));
  return first == nullptr ? nullptr : first + at;
}

// The tensor, or a copy of it where its address is not a multiple of 16 bytes, which the kernels' copies need.
inline Tensor aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(address(tensor)) % 16 == 0 ? tensor : torch::stable::clone(tensor);
}
inline Maybe aligned(const Maybe& tensor) { return tensor ? Maybe(aligned(*tensor)) : tensor; }

// The values of w_down [d_model, d_ff] in the order of neurons: a copy, unless that is how they are held.
inline Tensor by_neuron(const Tensor& w_down) {
  return aligned(w_down.stride(0) == 1 ? w_down : torch::stable::contiguous(torch::stable::transpose(w_down, 0, 1)));
}

// Points each buffer to its place in a workspace. offsets: of all of them, in bytes
template <typename Place, typename... Value>
void point(char* memory, const Place& offsets, Value*&... buffers) {
  if (std::size(offsets) != sizeof...(Value))
    throw std::runtime_error("offsets: expected " + std::to_string(sizeof...(Value)) + ", got " +
                             std::to_string(std::size(offsets)));
  auto offset = std::begin(offsets);
  ((buffers = reinterpret_cast<Value*>(memory + *offset++)), ...);
}

// One allocation, and where in it each buffer begins.
struct WorkspaceTensor {
  using Fields = Types<Tensor, Offsets>;
  Tensor memory;  // uint8 [bytes]
  Offsets offsets;

  // Points each buffer to its place in the workspace, in the order of `offsets`.
  template <typename... Value>
  void point(Value*&... buffers) const {
    twell::point(as<char>(memory), offsets, buffers...);
  }
};

// Makes a tensor's device the current one for as long as it lives, if it is not.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& tensor) {
    int current;
    check(cudaGetDevice(&current), "device");
    if (tensor.get_device_index() != current) guard_.emplace(tensor.get_device_index());
  }

 private:
  std::optional<DeviceGuard> guard_;
};

inline cudaStream_t stream_of(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Calls run.operator()<T>(), T being the type of x's values.
template <typename Run>
void by_type(const Tensor& x, const Run& run) {
  if (x.scalar_type() == torch::headeronly::ScalarType::BFloat16)
    run.template operator()<__nv_bfloat16>();
  else
    run.template operator()<__half>();
}

// An unwritten tensor on the device of another; type: as aoti_torch_dtype_… returns it. Straight from the allocator, as
// the host's time counts where it is used.
inline Tensor unwritten(const Tensor& like, int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t type) {
  int32_t device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  AtenTensorHandle tensor;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides, type, device, like.get_device_index(), &tensor));
  return Tensor(tensor);
}

// The same, contiguous.
template <size_t N>
Tensor unwritten(const Tensor& like, const int64_t (&sizes)[N], int32_t type) {
  int64_t strides[N];
  for (int64_t i = N - 1, stride = 1; i >= 0; stride *= sizes[i--]) strides[i] = stride;
  return unwritten(like, N, sizes, strides, type);
}

// The same, of the other's shape, strides and type.
inline Tensor unwritten(const Tensor& like) {
  int64_t *sizes, *strides;
  int32_t type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(like.get(), &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(like.get(), &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &type));
  return unwritten(like, like.dim(), sizes, strides, type);
}

// The tensors of an FFN, as its callers hold them. In the schema: TWELL_FFN_SCHEMA.
struct FfnTensors {
  using Fields = Types<Tensor, Tensor, Maybe, Tensor, Maybe, Maybe, Maybe>;
  Tensor x;       // [..., d_model], contiguous
  Tensor w_gate;  // [d_ff, d_model], contiguous
  Maybe w_up;     // [d_ff, d_model], contiguous; none in a plain FFN
  Tensor w_down;  // [d_model, d_ff], contiguous or the transpose of a contiguous tensor
  Maybe b_gate;   // [d_ff]
  Maybe b_up;     // [d_ff]
  Maybe b_down;   // [d_model]

  // The same values at addresses that the kernels can read: copies where they are not.
  FfnTensors readable() const {
    return {aligned(x), aligned(w_gate), aligned(w_up), by_neuron(w_down), b_gate, b_up, b_down};
  }

  // Writes sizes and addresses into a family's own struct; `rows` of x and y from `row` on.
  template <typename Ffn>
  void put_into(Ffn& f, const Tensor& y, const Tensor& finite, int64_t row, int64_t rows) const {
    put_weights_into(f);
    put_rows_into(f, y, finite, row, rows);
  }

  // The same of rows alone, once the weights are there.
  template <typename Ffn>
  void put_rows_into(Ffn& f, const Tensor& y, const Tensor& finite, int64_t row, int64_t rows) const {
    f.rows = rows, f.x = as<uint16_t>(x, row * f.d_model);
    f.y = as<uint16_t>(y, row * f.d_model), f.finite = as<uint8_t>(finite, row);
  }

  // The same of the weights alone.
  template <typename Ffn>
  void put_weights_into(Ffn& f) const {
    f.d_model = w_gate.size(1), f.d_ff = w_gate.size(0);
    f.w_gate = address(w_gate), f.w_up = address(w_up), f.w_down = address(w_down);
    f.b_gate = address(b_gate), f.b_up = address(b_up), f.b_down = address(b_down);
  }
};
#define TWELL_FFN_SCHEMA \
  "Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, Tensor? b_down, "

// Where the probes read and write, each of all rows of the call, or none where it is not requested. n: the rows of the
// call.
struct CountTensors {
#define TWELL_FIELD(...) , Maybe
  using Fields = Types<Maybe, Maybe, Maybe, Maybe, Maybe, Maybe TWELL_NEURON_SUMS(TWELL_FIELD)>;
#undef TWELL_FIELD
  Maybe nnz;        // int32 [n]
  Maybe counted;    // uint8 [n]: 0 where a row enters no statistic
  Maybe tokens;     // int32 [n]
  Maybe sequences;  // int32 [n]
  Maybe pairs;      // int64 [tile + 1]: (row, tile) pairs by their count
  Maybe fullest;    // int64 [tile + 1]: rows by the count of their fullest tile

  // [d_ff], of the types that NeuronSums in kernels/stats.py names
#define TWELL_TENSOR(name, ...) Maybe name;
  TWELL_NEURON_SUMS(TWELL_TENSOR)
#undef TWELL_TENSOR

  // Their addresses, from a row on.
  Counts from(int64_t row) const {
    Counts to{};
    to.counted = as<uint8_t>(counted, row), to.tokens = as<int>(tokens, row), to.sequences = as<int>(sequences, row);
    to.nnz = as<int>(nnz, row), to.pairs = as<unsigned long long>(pairs), to.fullest = as<unsigned long long>(fullest);
#define TWELL_POINT(name, type, ...) to.name = as<type>(name);
    TWELL_NEURON_SUMS(TWELL_POINT)
#undef TWELL_POINT
    return to;
  }
};
#define TWELL_SUM_SCHEMA(name, ...) ", Tensor(" #name "!)? " #name "=None"
#define TWELL_COUNTS_SCHEMA                                                                                            \
  "Tensor(nnz!)? nnz, Tensor? counted=None, Tensor? tokens=None, Tensor? sequences=None, Tensor(pairs!)? pairs=None, " \
  "Tensor(fullest!)? fullest=None" TWELL_NEURON_SUMS(TWELL_SUM_SCHEMA)

}  // namespace twell
