// The launches as a torch op. The host checks stand in kernels/call.py and kernels/cuda.py.
#include "common/bindings.h"
#include "cuda/ffn.h"

namespace {

using namespace twell;
using twell::cuda::Ffn;
using twell::cuda::Packed;

// workspace: masks, values, lists, sizes, hidden, tasks. stages: 1 gate, 2 plan, 4 up, 8 down, 16 counts, 32 packing.
void ffn(const Tensor& x, const Tensor& w_gate, const Maybe& w_up, const Tensor& w_down, const Maybe& b_gate, const Maybe& b_up,
         const Maybe& b_down, const Tensor& masks, const Tensor& values, const Tensor& lists, const Tensor& sizes,
         const Tensor& hidden, const Tensor& tasks, const Tensor& y, const Tensor& finite, const Maybe& used, const Maybe& words,
         const Maybe& spill_index, const Maybe& counted, const Maybe& tokens, const Maybe& sequences, const Maybe& nnz,
         const Maybe& pairs, const Maybe& fullest, const Maybe& fires, const Maybe& value_sum, const Maybe& value_max,
         const Maybe& token_min, const Maybe& token_max, const Maybe& first_sequence, bool relu2, bool up_relu, int64_t block,
         int64_t tile, int64_t stages) {
  const DeviceGuard guard(x.get_device_index());
  Ffn f{};
  f.rows = x.size(0), f.d_model = x.size(1), f.d_ff = w_gate.size(0);
  f.words = masks.size(1), f.pitch = values.size(1), f.block = block, f.blocks = sizes.size(0);
  f.relu2 = relu2, f.up_relu = up_relu;
  f.x = address(x), f.w_gate = address(w_gate), f.w_up = address(w_up), f.w_down = address(w_down);
  f.b_gate = address(b_gate), f.b_up = address(b_up), f.b_down = address(b_down);
  f.masks = as<uint32_t>(masks), f.values = address(values), f.lists = as<int>(lists), f.sizes = as<int>(sizes);
  f.hidden = address(hidden), f.tasks = as<int>(tasks), f.y = address(y), f.finite = as<uint8_t>(finite), f.used = as<int>(used);
  const Counts out = counts_of(counted, tokens, sequences, nnz, pairs, fullest, fires, value_sum, value_max, token_min, token_max,
                               first_sequence);
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
      "Tensor(a!) masks, Tensor(b!) values, Tensor(c!) lists, Tensor(d!) sizes, Tensor(e!) hidden, Tensor(f!) tasks, "
      "Tensor(g!) y, Tensor(h!) finite, Tensor(i!)? used, Tensor(j!)? words, Tensor(k!)? spill_index, Tensor? counted, "
      "Tensor? tokens, Tensor? sequences, Tensor(l!)? nnz, Tensor(m!)? pairs, Tensor(n!)? fullest, Tensor(o!)? fires, "
      "Tensor(p!)? value_sum, Tensor(q!)? value_max, Tensor(r!)? token_min, Tensor(s!)? token_max, "
      "Tensor(t!)? first_sequence, bool relu2, bool up_relu, int block, int tile, int stages) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) { m.impl("cuda_ffn", TORCH_BOX(&ffn)); }
