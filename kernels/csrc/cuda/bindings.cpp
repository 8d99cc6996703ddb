// The launches as a torch op. The host checks stand in kernels/call.py and kernels/cuda.py.
#include "common/bindings.h"
#include "cuda/params.h"

namespace {

using namespace twell;
using twell::cuda::Ffn;
using twell::cuda::Packed;

// So many rows of x, y and what else has one value a row, from `row` on. places: in the workspace, of masks, lists, sizes, hidden,
// tasks. stages: 1 gate, 2 plan, 4 up, 8 down, 16 counts, 32 packing.
void ffn(const Tensor& given_x, const Tensor& given_gate, const Maybe& given_up, const Tensor& given_down, const Maybe& b_gate,
         const Maybe& b_up, const Maybe& b_down, const Tensor& workspace, const Places& places, const Tensor& values, const Tensor& y,
         const Tensor& finite, const Maybe& used, const Maybe& words, const Maybe& spill_index, int64_t row, int64_t rows, bool relu2,
         bool up_relu, int64_t block, int64_t tile, int64_t stages, const Maybe& nnz, const Maybe& counted, const Maybe& tokens,
         const Maybe& sequences, const Maybe& pairs, const Maybe& fullest, const Maybe& fires, const Maybe& value_sum,
         const Maybe& value_max, const Maybe& token_min, const Maybe& token_max, const Maybe& first_sequence) {
  const DeviceGuard guard(given_x.get_device_index());
  const Tensor x = aligned(given_x), w_gate = aligned(given_gate), w_down = by_neuron(given_down);
  const Maybe w_up = aligned(given_up);
  Ffn f{};
  f.rows = rows, f.d_model = w_gate.size(1), f.d_ff = w_gate.size(0);
  f.words = (f.d_ff + 31) / 32, f.pitch = values.size(1), f.block = block, f.blocks = (f.rows + f.block - 1) / f.block;
  f.relu2 = relu2, f.up_relu = up_relu;
  f.x = as<uint16_t>(x, row * f.d_model), f.w_gate = address(w_gate), f.w_up = address(w_up), f.w_down = address(w_down);
  f.b_gate = address(b_gate), f.b_up = address(b_up), f.b_down = address(b_down);
  point(workspace, places, f.masks, f.lists, f.sizes, f.hidden, f.tasks);
  f.values = address(values), f.y = as<uint16_t>(y, row * f.d_model), f.finite = as<uint8_t>(finite, row), f.used = as<int>(used, row);
  const Counts out = counts_of(row, counted, tokens, sequences, nnz, pairs, fullest, fires, value_sum, value_max, token_min,
                               token_max, first_sequence);
  const cudaStream_t on = stream_of(x);
  by_type(x, [&]<typename T>() {
    using namespace twell::cuda;
    if (stages & 1) launch_gate<T>(f, on);
    if (stages & 2) launch_plan(f, on);
    if (stages & 4 && f.w_up != nullptr) launch_up<T>(f, on);
    if (stages & 8) launch_down<T>(f, on);
    if (stages & 16 && out.nnz != nullptr) launch_counts<T>(f, out, tile, on);
    if (stages & 32 && words) {
      const Packed packed{static_cast<int>(tile), static_cast<int>(words->size(2)), static_cast<int>(words->size(1)),
                          as<uint32_t>(words), as<int>(spill_index)};
      launch_pack(f, packed, on);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def(
      "cuda_ffn(Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, Tensor? b_down, "
      "Tensor(a!) workspace, SymInt[] places, Tensor(b!) values, Tensor(c!) y, Tensor(d!) finite, Tensor(e!)? used, "
      "Tensor(f!)? words, Tensor(g!)? spill_index, SymInt row, SymInt rows, bool relu2, bool up_relu, int block, int tile, "
      "int stages, Tensor(h!)? nnz, Tensor? counted=None, Tensor? tokens=None, Tensor? sequences=None, Tensor(i!)? pairs=None, "
      "Tensor(j!)? fullest=None, Tensor(k!)? fires=None, Tensor(l!)? value_sum=None, Tensor(m!)? value_max=None, "
      "Tensor(n!)? token_min=None, Tensor(o!)? token_max=None, Tensor(p!)? first_sequence=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) { m.impl("cuda_ffn", TORCH_BOX(&ffn)); }
