// The launches as torch ops. The host checks are in kernels/backends/union_counts.py.
#include "packed/tensors.h"
#include "unions/unions.h"

namespace {

using namespace twell;

void of_rows(const Tensor& heads, const Maybe& tails, const Maybe& spill_index, const Tensor& spill,
             const Tensor& blocks, const Tensor& marks, const Tensor& histogram, int64_t tile, int64_t slots) {
  const DeviceGuard guard(heads.get_device_index());
  const Packed packed = packed_of(heads, tails, spill_index, spill, tile, slots);
  twell::unions::launch_rows(packed, histogram.size(0) - 1, as<int>(blocks), blocks.size(0), blocks.size(1),
                             as<uint32_t>(marks), as<unsigned long long>(histogram), stream_of(heads));
}

void of_blocks(const Tensor& smaller, const Tensor& blocks, const Tensor& marks, const Tensor& histogram) {
  const DeviceGuard guard(smaller.get_device_index());
  twell::unions::launch_blocks(as<uint32_t>(smaller), as<int>(blocks), blocks.size(0), blocks.size(1), marks.size(1),
                               as<uint32_t>(marks), as<unsigned long long>(histogram), stream_of(smaller));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def(
      "unions_of_rows(Tensor heads, Tensor? tails, Tensor? spill_index, Tensor spill, Tensor blocks, Tensor(a!) marks, "
      "Tensor(b!) histogram, int tile, int slots) -> ()");
  m.def("unions_of_blocks(Tensor smaller, Tensor blocks, Tensor(a!) marks, Tensor(b!) histogram) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) {
  m.impl("unions_of_rows", TORCH_BOX(&of_rows));
  m.impl("unions_of_blocks", TORCH_BOX(&of_blocks));
}
