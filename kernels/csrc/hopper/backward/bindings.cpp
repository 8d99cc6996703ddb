// The training passes as torch ops. The host checks are in kernels/training.py and kernels/backends/hopper_backward.py.
#include "common/bindings.h"
#include "common/device.h"
#include "hopper/backward/params.h"

namespace {

using namespace twell;
using namespace twell::hopper;
using Value = __nv_bfloat16;

int blocks_of(const Tensor& x) { return static_cast<int>((x.size(0) + kBlockRows - 1) / kBlockRows); }
int panels_of(const Tensor& w) { return static_cast<int>((w.size(0) + kPanelColumns - 1) / kPanelColumns); }

// values: [3, capacity] of positions, gates and hidden values; tables: starts, order, union_sizes, fires and used, one
// after the other.
Kept kept_of(const Tensor& values, const Tensor& unions, const Tensor& tables, int blocks, int panels, int d_ff, float* l1_parts) {
  const int64_t capacity = values.size(1);
  Kept k{};
  k.capacity = static_cast<int>(capacity);
  k.positions = as<uint16_t>(values), k.gates = k.positions + capacity, k.hidden = k.gates + capacity;
  k.starts = as<int>(tables), k.order = k.starts + static_cast<int64_t>(blocks) * (panels + 1);
  k.union_sizes = k.order + static_cast<int64_t>(blocks) * kBlockRows, k.fires = k.union_sizes + blocks, k.used = k.fires + d_ff;
  k.unions = as<uint16_t>(unions), k.l1_parts = l1_parts;
  return k;
}

// The forward pass of x in a workspace, of which offsets has heads, tails, masks, spill, fired, row_sums, order, unions,
// union_sizes, hidden, tasks, parts, part_ready. Its results are still to be set.
Ffn ffn_of(const Tensor& x, const Tensor& w_gate, const Tensor& w_up, const Tensor& w_down, const Tensor& workspace, const Offsets& offsets) {
  Ffn f{};
  f.planned = true;
  f.rows = x.size(0), f.d_model = w_gate.size(1), f.d_ff = w_gate.size(0);
  f.tiles = (f.d_ff + kTile - 1) / kTile, f.panels = panels_of(w_gate), f.blocks = blocks_of(x);
  f.x = address(x), f.w_gate = address(w_gate), f.w_up = address(w_up), f.w_down = address(w_down);
  WorkspaceTensor{workspace, offsets}.point(f.heads, f.tails, f.masks, f.spill, f.fired, f.row_sums, f.order, f.unions, f.union_sizes, f.hidden, f.tasks,
        f.parts, f.part_ready);
  f.dense_tiles = f.blocks <= kDenseTileBlocks ? reinterpret_cast<int*>(f.row_sums + f.rows + 1) : nullptr;
  f.continues_with_up = f.dense_tiles != nullptr;
  return f;
}

// Launches a forward pass again, which does nothing where all its values were kept, and brings them to where b reads.
// finite: [rows], to be written
void repeat_forward(const Backward& b, Ffn f, const Kept& kept, uint8_t* finite, cudaStream_t on) {
  f.finite = finite, f.used = kept.used, f.capacity = kept.capacity;
  Kept again{};
  again.capacity = f.rows * f.d_ff, again.positions = b.kept.positions, again.gates = b.kept.gates, again.hidden = b.kept.hidden;
  again.starts = b.kept.starts;
  launch_gate<Value>(f, on);
  launch_plan<Value>(f, true, on);
  launch_up<Value>(f, on);
  launch_keep<Value>(f, again, nullptr, on);
  launch_restore<Value>(b, kept, on);
}

// offsets: as for ffn_of.
void forward(const Tensor& given_x, const Tensor& given_gate, const Tensor& given_up, const Tensor& given_down, const Maybe& counted,
             const Tensor& workspace, const Offsets& offsets, const Tensor& y, const Tensor& finite, const Tensor& nnz, const Tensor& values,
             const Tensor& unions, const Tensor& tables, const Tensor& l1_parts) {
  const DeviceGuard guard(given_x.get_device_index());
  const Tensor x = aligned(given_x), w_gate = aligned(given_gate), w_up = aligned(given_up), w_down = by_neuron(given_down);
  Ffn f = ffn_of(x, w_gate, w_up, w_down, workspace, offsets);
  f.y = address(y), f.finite = as<uint8_t>(finite), f.nnz = as<int>(nnz);
  const Kept kept = kept_of(values, unions, tables, f.blocks, f.panels, f.d_ff, as<float>(l1_parts));
  const cudaStream_t on = stream_of(x);
  check(cudaMemsetAsync(kept.fires, 0, (f.d_ff + 1) * sizeof(int), on), "memset");  // `used` follows them
  launch_gate<Value>(f, on);
  launch_plan<Value>(f, true, on);
  launch_up<Value>(f, on);
  launch_down<Value>(f, on);
  launch_keep<Value>(f, kept, as<uint8_t>(counted), on);
}

// offsets: of positions, gates, hidden, starts and finite of a pass that is repeated; then of rank_of, neuron_at,
// union_ranks, marks, before, tokens, token_counts, places, tasks, task_count, panels_of_rows, chunks, parts, arrived.
// repeat: as for ffn_of, in the same workspace; empty if values has room for all.
void backward(const Tensor& given_dy, const Tensor& given_x, const Tensor& given_gate, const Tensor& given_up, const Tensor& given_down,
              const Tensor& finite, const Maybe& counted, const Tensor& l1_scale, const Tensor& values, const Tensor& unions,
              const Tensor& tables, const Tensor& workspace, const Offsets& offsets, const Offsets& repeat, const Tensor& dx,
              const Tensor& d_gate, const Tensor& d_up, const Tensor& d_down) {
  const DeviceGuard guard(given_x.get_device_index());
  const Tensor dy = aligned(given_dy), x = aligned(given_x), w_gate = aligned(given_gate), w_up = aligned(given_up),
               w_down = by_neuron(given_down);
  Backward b{};
  b.rows = x.size(0), b.d_model = w_gate.size(1), b.d_ff = w_gate.size(0), b.blocks = blocks_of(x), b.panels = panels_of(w_gate);
  b.float_weights = d_gate.scalar_type() == torch::headeronly::ScalarType::Float;
  b.x = address(x), b.dy = address(dy), b.w_gate = address(w_gate), b.w_up = address(w_up), b.w_down = address(w_down);
  b.finite = as<uint8_t>(finite), b.counted = as<uint8_t>(counted), b.l1_scale = as<float>(l1_scale);
  b.kept = kept_of(values, unions, tables, b.blocks, b.panels, b.d_ff, nullptr);
  Kept again{};
  uint8_t* finite_again = nullptr;
  WorkspaceTensor{workspace, offsets}.point(again.positions, again.gates, again.hidden, again.starts, finite_again, b.rank_of, b.neuron_at, b.union_ranks, b.marks, b.before, b.tokens, b.token_counts, b.places, b.tasks, b.task_count,
        b.panels_of_rows, b.chunks, b.parts, b.arrived);
  b.dx = address(dx), b.d_gate = address(d_gate), b.d_up = address(d_up), b.d_down = address(d_down);
  const cudaStream_t on = stream_of(x);
  if (!repeat.empty()) {
    const Kept kept = b.kept;
    b.kept.positions = again.positions, b.kept.gates = again.gates, b.kept.hidden = again.hidden, b.kept.starts = again.starts;
    repeat_forward(b, ffn_of(x, w_gate, w_up, w_down, workspace, repeat), kept, finite_again, on);
  }
  launch_token_lists<Value>(b, on);
  launch_dh<Value>(b, on);
  launch_dx<Value>(b, on);
  launch_weights<Value>(b, on);
}

// from: [rows, columns], float32 or bfloat16; to: [columns, rows], bfloat16, or float32 from float32.
void transpose(const Tensor& given, const Tensor& to) {
  const DeviceGuard guard(given.get_device_index());
  const Tensor from = aligned(given);
  const bool reads_float = from.scalar_type() == torch::headeronly::ScalarType::Float;
  const bool writes_float = to.scalar_type() == torch::headeronly::ScalarType::Float;
  const auto run = writes_float ? launch_transpose<float, float> : reads_float ? launch_transpose<float, Value> : launch_transpose<Value, Value>;
  run(address(from), address(to), from.size(0), from.size(1), stream_of(from));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def(
      "hopper_train_forward(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor? counted, Tensor(a!) workspace, SymInt[] offsets, "
      "Tensor(b!) y, Tensor(c!) finite, Tensor(d!) nnz, Tensor(e!) values, Tensor(f!) unions, Tensor(g!) tables, Tensor(h!) l1_parts) -> ()");
  m.def(
      "hopper_train_backward(Tensor dy, Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor finite, Tensor? counted, "
      "Tensor l1_scale, Tensor values, Tensor unions, Tensor tables, Tensor(a!) workspace, SymInt[] offsets, SymInt[] repeat, "
      "Tensor(b!) dx, Tensor(c!) d_gate, Tensor(d!) d_up, Tensor(e!) d_down) -> ()");
  m.def("hopper_transpose(Tensor from, Tensor(a!) to) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) {
  m.impl("hopper_train_forward", TORCH_BOX(&forward));
  m.impl("hopper_train_backward", TORCH_BOX(&backward));
  m.impl("hopper_transpose", TORCH_BOX(&transpose));
}
