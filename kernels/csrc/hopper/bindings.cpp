// The launches as torch ops. The host checks stand in kernels/call.py and kernels/hopper.py.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "hopper/ffn.h"

struct __nv_bfloat16;
struct __half;

namespace {

using torch::stable::Tensor;
using twell::hopper::Counts;
using twell::hopper::Ffn;
using Maybe = std::optional<Tensor>;

void* at(const Tensor& tensor) { return tensor.data_ptr(); }
void* at(const Maybe& tensor) { return tensor ? tensor->data_ptr() : nullptr; }
template <typename T, typename Any>
T* as(const Any& tensor) {
  return static_cast<T*>(at(tensor));
}

// workspace: heads, tails, masks, spill, fired, fired_in_place, order, unions, union_sizes, hidden, tasks, parts, part_ready.
void ffn(const Tensor& x, const Tensor& w_gate, const Maybe& w_up, const Tensor& w_down, const Maybe& b_gate, const Maybe& b_up,
         const Maybe& b_down, const Tensor& heads, const Tensor& tails, const Tensor& masks, const Tensor& spill, const Tensor& fired,
         const Tensor& fired_in_place, const Tensor& order,
         const Tensor& unions, const Tensor& union_sizes, const Tensor& hidden, const Tensor& tasks, const Tensor& parts,
         const Tensor& part_ready, const Tensor& y,
         const Tensor& finite, const Maybe& counted, const Maybe& tokens, const Maybe& sequences, const Maybe& nnz, const Maybe& pairs, const Maybe& fullest,
         const Maybe& fires, const Maybe& value_sum, const Maybe& value_max, const Maybe& token_min, const Maybe& token_max,
         const Maybe& first_sequence, int64_t stages) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  Ffn f{};
  f.rows = x.size(0), f.d_model = x.size(1), f.d_ff = w_gate.size(0);
  f.tiles = (f.d_ff + twell::hopper::kTile - 1) / twell::hopper::kTile;
  f.panels = (f.d_ff + twell::hopper::kPanelColumns - 1) / twell::hopper::kPanelColumns;
  f.blocks = (f.rows + twell::hopper::kBlockRows - 1) / twell::hopper::kBlockRows;
  f.x = at(x), f.w_gate = at(w_gate), f.w_up = at(w_up), f.w_down = at(w_down);
  f.b_gate = at(b_gate), f.b_up = at(b_up), f.b_down = at(b_down);
  f.heads = as<uint32_t>(heads), f.tails = as<uint32_t>(tails), f.spill = at(spill), f.order = as<int>(order);
  f.masks = as<uint32_t>(masks), f.fired = as<uint32_t>(fired), f.fired_in_place = as<int>(fired_in_place), f.unions = as<uint16_t>(unions);
  f.union_sizes = as<int>(union_sizes), f.hidden = at(hidden), f.tasks = as<int>(tasks);
  f.parts = as<float>(parts), f.part_ready = as<int>(part_ready);
  f.y = at(y), f.finite = as<uint8_t>(finite);
  Counts out{as<uint8_t>(counted), as<int>(tokens), as<int>(sequences), as<int>(nnz),
             as<unsigned long long>(pairs), as<unsigned long long>(fullest), as<unsigned long long>(fires),
             as<unsigned long long>(value_sum), as<float>(value_max), as<int>(token_min), as<int>(token_max),
             as<uint32_t>(first_sequence)};
  const auto run = [&]<typename T>(cudaStream_t on) {
    using namespace twell::hopper;
    if (f.rows <= kMidRows) {  // words and, from them, counts only where more is asked for than nnz
      const bool words = stages & 2, few = f.rows <= kFewRows;
      if (stages & 1) few ? launch_few_gate_up<T>(f, words, on) : launch_mid_gate_up<T>(f, words, on);
      if (words) launch_few_pack<T>(f, on);
      int* nnz = words ? nullptr : out.nnz;
      if (stages & 8) few ? launch_few_down<T>(f, nnz, on) : launch_mid_down<T>(f, nnz, on);
    } else {
      if (stages & 1) launch_gate<T>(f, on);
      if (stages & 2) launch_plan<T>(f, on);
      if (stages & 4 && f.w_up != nullptr) launch_up<T>(f, on);
      if (stages & 8) launch_down<T>(f, on);
    }
    if (stages & 16 && out.nnz != nullptr) launch_counts<T>(f, out, on);
  };
  const auto on = static_cast<cudaStream_t>(stream);
  if (x.scalar_type() == torch::headeronly::ScalarType::BFloat16)
    run.operator()<__nv_bfloat16>(on);
  else
    run.operator()<__half>(on);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def(
      "hopper_ffn(Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, Tensor? b_down, "
      "Tensor(a!) heads, Tensor(b!) tails, Tensor(x!) masks, Tensor(c!) spill, Tensor(s!) fired, Tensor(t!) fired_in_place, Tensor(u!) order, Tensor(d!) unions, Tensor(e!) union_sizes, "
      "Tensor(f!) hidden, Tensor(g!) tasks, Tensor(v!) parts, Tensor(w!) part_ready, Tensor(h!) y, Tensor(i!) finite, Tensor? counted, Tensor? tokens, Tensor? sequences, "
      "Tensor(j!)? nnz, Tensor(k!)? pairs, Tensor(l!)? fullest, Tensor(m!)? fires, Tensor(n!)? value_sum, "
      "Tensor(o!)? value_max, Tensor(p!)? token_min, Tensor(q!)? token_max, Tensor(r!)? first_sequence, "
      "int stages) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) { m.impl("hopper_ffn", TORCH_BOX(&ffn)); }
