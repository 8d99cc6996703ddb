// The launches as torch ops. The host checks stand in kernels/call.py and kernels/hopper.py.
#include "common/bindings.h"
#include "hopper/ffn.h"

namespace {

using namespace twell;
using twell::hopper::Ffn, twell::hopper::kWholeBlocks;

// workspace: heads, tails, masks, spill, fired, row_sums, order, unions, union_sizes, hidden, tasks, parts, part_ready.
void ffn(const Tensor& x, const Tensor& w_gate, const Maybe& w_up, const Tensor& w_down, const Maybe& b_gate, const Maybe& b_up,
         const Maybe& b_down, const Tensor& heads, const Tensor& tails, const Tensor& masks, const Tensor& spill,
         const Tensor& fired, const Tensor& row_sums, const Tensor& order, const Tensor& unions, const Tensor& union_sizes,
         const Tensor& hidden, const Tensor& tasks, const Tensor& parts, const Tensor& part_ready, const Tensor& y,
         const Tensor& finite, const Maybe& counted, const Maybe& tokens, const Maybe& sequences, const Maybe& nnz,
         const Maybe& pairs, const Maybe& fullest, const Maybe& fires, const Maybe& value_sum, const Maybe& value_max,
         const Maybe& token_min, const Maybe& token_max, const Maybe& first_sequence, bool planned, int64_t stages) {
  const DeviceGuard guard(x.get_device_index());
  Ffn f{};
  f.planned = planned;
  f.rows = x.size(0), f.d_model = x.size(1), f.d_ff = w_gate.size(0);
  f.tiles = (f.d_ff + twell::hopper::kTile - 1) / twell::hopper::kTile;
  f.panels = (f.d_ff + twell::hopper::kPanelColumns - 1) / twell::hopper::kPanelColumns;
  f.blocks = (f.rows + twell::hopper::kBlockRows - 1) / twell::hopper::kBlockRows;
  f.x = address(x), f.w_gate = address(w_gate), f.w_up = address(w_up), f.w_down = address(w_down);
  f.b_gate = address(b_gate), f.b_up = address(b_up), f.b_down = address(b_down);
  f.heads = as<uint32_t>(heads), f.tails = as<uint32_t>(tails), f.spill = address(spill), f.order = as<int>(order);
  f.masks = as<uint32_t>(masks), f.fired = as<uint32_t>(fired), f.row_sums = as<uint32_t>(row_sums), f.unions = as<uint16_t>(unions);
  f.whole = f.w_up != nullptr && f.blocks <= kWholeBlocks ? reinterpret_cast<int*>(f.row_sums + f.rows + 1) : nullptr;
  f.goes_on = f.whole != nullptr && stages & 4;
  f.union_sizes = as<int>(union_sizes), f.hidden = address(hidden), f.tasks = as<int>(tasks);
  f.parts = as<float>(parts), f.part_ready = as<int>(part_ready);
  f.y = address(y), f.finite = as<uint8_t>(finite), f.nnz = as<int>(nnz);
  const Counts out = counts_of(counted, tokens, sequences, nnz, pairs, fullest, fires, value_sum, value_max, token_min, token_max,
                               first_sequence);
  const cudaStream_t on = stream_of(x);
  by_type(x, [&]<typename T>() {
    using namespace twell::hopper;
    if (!f.planned) {  // words only where more is asked for than nnz
      const bool words = stages & 2, few = f.rows <= kFewRows;
      if (stages & 1) few ? launch_few_gate_up<T>(f, words, on) : launch_mid_gate_up<T>(f, words, on);
      if (words) launch_few_pack<T>(f, on);
      if (stages & 8) few ? launch_few_down<T>(f, f.nnz, on) : launch_mid_down<T>(f, f.nnz, on);
    } else {
      if (stages & 1) launch_gate<T>(f, on);
      if (stages & 2) launch_plan<T>(f, stages & 1, on);
      if (stages & 4 && f.w_up != nullptr) launch_up<T>(f, on);
      if (stages & 8) launch_down<T>(f, on);
    }
    if (stages & 16) launch_counts<T>(f, out, on);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def(
      "hopper_ffn(Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, Tensor? b_down, "
      "Tensor(a!) heads, Tensor(b!) tails, Tensor(x!) masks, Tensor(c!) spill, Tensor(s!) fired, Tensor(t!) row_sums, "
      "Tensor(u!) order, Tensor(d!) unions, Tensor(e!) union_sizes, Tensor(f!) hidden, Tensor(g!) tasks, Tensor(v!) parts, "
      "Tensor(w!) part_ready, Tensor(h!) y, Tensor(i!) finite, Tensor? counted, Tensor? tokens, Tensor? sequences, "
      "Tensor(j!)? nnz, Tensor(k!)? pairs, Tensor(l!)? fullest, Tensor(m!)? fires, Tensor(n!)? value_sum, "
      "Tensor(o!)? value_max, Tensor(p!)? token_min, Tensor(q!)? token_max, Tensor(r!)? first_sequence, "
      "bool planned, int stages) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) { m.impl("hopper_ffn", TORCH_BOX(&ffn)); }
