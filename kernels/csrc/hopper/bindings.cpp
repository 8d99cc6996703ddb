// The launches as torch ops. The host checks stand in kernels/call.py and kernels/hopper.py.
#include "common/bindings.h"
#include "common/device.h"
#include "hopper/dispatch.h"

namespace {

using namespace twell;
using twell::hopper::Ffn, twell::hopper::kDenseTileBlocks;

// The two launches of a call without a plan.
struct Launches {
  void (*gate_up)(const Ffn&, bool, cudaStream_t);
  void (*down)(const Ffn&, int*, cudaStream_t);
};

template <typename T>
Launches launches_of(twell::hopper::Path path) {
  using namespace twell::hopper;
  if (path == Path::kRows16) return {launch_rows16_gate_up<T>, launch_rows16_down<T>};
  if (path == Path::kRows64) return {launch_rows64_gate_up<T>, launch_rows64_down<T>};
  return {launch_tiled_gate_up<T>, launch_tiled_down<T>};
}

// So many rows of x, y and what else has one value a row, from `row` on. places: in the workspace, of heads, tails, masks, spill,
// fired, row_sums, order, unions, union_sizes, hidden, tasks, parts, part_ready.
void ffn(const Tensor& given_x, const Tensor& given_gate, const Maybe& given_up, const Tensor& given_down, const Maybe& b_gate,
         const Maybe& b_up, const Maybe& b_down, const Tensor& workspace, const Places& places, const Tensor& y, const Tensor& finite,
         int64_t row, int64_t rows, bool planned, int64_t stages, const Maybe& nnz, const Maybe& counted, const Maybe& tokens,
         const Maybe& sequences, const Maybe& pairs, const Maybe& fullest, const Maybe& fires, const Maybe& value_sum,
         const Maybe& value_max, const Maybe& token_min, const Maybe& token_max, const Maybe& first_sequence) {
  const DeviceGuard guard(given_x.get_device_index());
  const Tensor x = aligned(given_x), w_gate = aligned(given_gate), w_down = by_neuron(given_down);
  const Maybe w_up = aligned(given_up);
  Ffn f{};
  f.planned = planned;
  f.rows = rows, f.d_model = w_gate.size(1), f.d_ff = w_gate.size(0);
  f.tiles = (f.d_ff + twell::hopper::kTile - 1) / twell::hopper::kTile;
  f.panels = (f.d_ff + twell::hopper::kPanelColumns - 1) / twell::hopper::kPanelColumns;
  f.blocks = (f.rows + twell::hopper::kBlockRows - 1) / twell::hopper::kBlockRows;
  f.x = as<uint16_t>(x, row * f.d_model), f.w_gate = address(w_gate), f.w_up = address(w_up), f.w_down = address(w_down);
  f.b_gate = address(b_gate), f.b_up = address(b_up), f.b_down = address(b_down);
  point(workspace, places, f.heads, f.tails, f.masks, f.spill, f.fired, f.row_sums, f.order, f.unions, f.union_sizes, f.hidden,
        f.tasks, f.parts, f.part_ready);
  f.dense_tiles = f.w_up != nullptr && f.blocks <= kDenseTileBlocks ? reinterpret_cast<int*>(f.row_sums + f.rows + 1) : nullptr;
  f.continues_with_up = f.dense_tiles != nullptr && stages & 4;
  f.y = as<uint16_t>(y, row * f.d_model), f.finite = as<uint8_t>(finite, row), f.nnz = as<int>(nnz, row);
  const Counts out = counts_of(row, counted, tokens, sequences, nnz, pairs, fullest, fires, value_sum, value_max, token_min,
                               token_max, first_sequence);
  const cudaStream_t on = stream_of(x);
  by_type(x, [&]<typename T>() {
    using namespace twell::hopper;
    if (!f.planned) {  // words only where more is asked for than nnz
      const bool words = stages & 2;
      const Launches launches = launches_of<T>(path_of(f, multiprocessors()));
      if (stages & 1) launches.gate_up(f, words, on);
      if (words) launch_pack_words<T>(f, on);
      if (stages & 8) launches.down(f, f.nnz, on);
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
      "Tensor(a!) workspace, SymInt[] places, Tensor(b!) y, Tensor(c!) finite, SymInt row, SymInt rows, bool planned, int stages, "
      "Tensor(d!)? nnz, Tensor? counted=None, Tensor? tokens=None, Tensor? sequences=None, Tensor(e!)? pairs=None, "
      "Tensor(f!)? fullest=None, Tensor(g!)? fires=None, Tensor(h!)? value_sum=None, Tensor(i!)? value_max=None, "
      "Tensor(j!)? token_min=None, Tensor(k!)? token_max=None, Tensor(l!)? first_sequence=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) { m.impl("hopper_ffn", TORCH_BOX(&ffn)); }
