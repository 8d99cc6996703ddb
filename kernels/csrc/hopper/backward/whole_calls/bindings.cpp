// A training pass as one op, which makes its results and its workspace itself, for callers whose time is the host's.
// The launches and their results are those of the ops in ../bindings.cpp, but for the order in which l1 is added up.
#include "hopper/backward/whole_calls/tensors.h"
#include "hopper/backward/whole_calls/totals.h"

namespace {

using namespace twell;
using namespace twell::hopper;
using torch::stable::empty_like;

bool lies_by_neuron(const Tensor& w_down) { return w_down.stride(0) == 1; }

// The transpose of a matrix [d_ff, d_model] as a tensor [d_model, d_ff], without a copy.
Tensor transposed(const Tensor& matrix) { return torch::stable::transpose(matrix, 0, 1); }

// An unwritten float32 [] on the device of another.
Tensor scalar_like(const Tensor& like) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef{},
                                  torch::headeronly::ScalarType::Float);
}

// The down weights as the transpose of a matrix of bfloat16 by neuron: themselves, or a copy.
Tensor readable_down(const Tensor& w_down, const Tensor& w_gate) {
  if (lies_by_neuron(w_down)) return aligned(w_down);
  const Tensor from = aligned(w_down), by_neuron = empty_like(w_gate);
  launch_transpose_of(from, address(by_neuron), false);
  return transposed(by_neuron);
}

// w_gate, w_up: [d_ff, d_model], the latter none in a plain FFN; w_down: [d_model, d_ff], of float32 too unless it lies
// by neuron. capacity: values that are kept; whole_from: as in Kept, or -1 if there is no room for g and h; offsets: as
// for ffn_of, in a workspace of so many bytes. Returns y, l1, nnz, fires, finite; and values, unions, tables and the
// number of counted rows, for the backward pass.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& given_x, const Tensor& given_gate, const Maybe& given_up, const Tensor& given_down,
    const Maybe& counted, int64_t capacity, int64_t whole_from, const Offsets& offsets, int64_t bytes) {
  const DeviceGuard guard(given_x.get_device_index());
  const Tensor x = aligned(given_x), w_gate = aligned(given_gate), w_down = readable_down(given_down, w_gate);
  const Maybe w_up = aligned(given_up);
  const Tensor memory = unwritten(x, {bytes}, aoti_torch_dtype_uint8());
  Ffn f = ffn_of(x, w_gate, w_up, w_down, memory, offsets);
  const int64_t blocks = f.blocks, panels = f.panels, parts = blocks * kKeepCtas;
  const int32_t int16 = aoti_torch_dtype_int16(), int32 = aoti_torch_dtype_int32(),
                float32 = aoti_torch_dtype_float32();
  const int64_t before_fires = blocks * (panels + 1) + blocks * kBlockRows + blocks;
  const Tensor tables = unwritten(x, {before_fires + f.d_ff + 1}, int32);
  const cudaStream_t on = stream_of(x);
  const int pass = rows_of_pass(offsets, f.rows);
  launch_first(f, as<int>(tables) + before_fires, pass, on);  // the GPU has work while the rest is made
  const Tensor y = empty_like(x), l1 = scalar_like(x), counted_rows = unwritten(x, {1}, float32);
  const Tensor nnz = unwritten(x, {f.rows}, int32), fires = unwritten(x, {f.d_ff}, aoti_torch_dtype_int64());
  const Tensor finite = unwritten(x, {f.rows}, aoti_torch_dtype_bool()), l1_parts = unwritten(x, {parts}, float32);
  const Tensor values = whole_from < 0 ? unwritten(x, {3, capacity}, int16)
                                       : unwritten(x, {w_up ? 2 : 1, f.rows, f.d_ff}, int16),
               unions = unwritten(x, {blocks, panels * kPanelColumns}, int16);
  f.y = address(y), f.finite = as<uint8_t>(finite), f.nnz = as<int>(nnz);
  Kept kept = kept_of(values, capacity, unions, tables, f.rows, f.panels, f.d_ff, as<float>(l1_parts));
  kept.whole_from = static_cast<int>(whole_from);
  launch_rest(f, kept, as<uint8_t>(counted), pass, on);
  launch_totals({f.rows, f.d_ff, static_cast<int>(parts), f.finite, as<uint8_t>(counted), as<float>(l1_parts),
                 kept.fires, as<float>(l1), as<float>(counted_rows), as<int64_t>(fires)},
                on);
  return {y, l1, nnz, fires, finite, values, unions, tables, counted_rows};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // of x, w_gate, w_up and w_down

// d_l1: [] of float32, or none, which is 0; offsets, repeat: as in BackwardTensors, in a workspace of so many bytes.
// Returns gradients: those of weights in float32 or bfloat16, the last one as [d_ff, d_model] if w_down lies by neuron;
// that of w_up without a meaning in a plain FFN.
Gradients backward(const Tensor& given_dy, const Maybe& d_l1, const Tensor& given_x, const Tensor& given_gate,
                   const Maybe& given_up, const Tensor& given_down, const Tensor& finite, const Maybe& counted,
                   const Tensor& values, const Tensor& unions, const Tensor& tables, const Tensor& counted_rows,
                   const Offsets& offsets, const Offsets& repeat, int64_t bytes, bool float_weights) {
  const DeviceGuard guard(given_x.get_device_index());
  const Tensor dy = aligned(given_dy), x = aligned(given_x), w_gate = aligned(given_gate),
               w_down = readable_down(given_down, w_gate);
  const Maybe w_up = aligned(given_up), zeros = zeros_without(w_up, w_gate);
  Tensor memory = unwritten(x, {bytes}, aoti_torch_dtype_uint8());
  const Tensor l1_scale = unwritten(x, {1}, aoti_torch_dtype_float32());
  const int64_t d_ff = w_gate.size(0), d_model = w_gate.size(1);
  const int32_t type = float_weights ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16();
  const Tensor dx = empty_like(x), d_gate = unwritten(x, {d_ff, d_model}, type),
               d_up = unwritten(x, {d_ff, d_model}, type), d_down = unwritten(x, {d_ff, d_model}, type);
  const cudaStream_t on = stream_of(x);
  launch_scale(as<float>(d_l1), as<float>(counted_rows), as<float>(l1_scale), on);
  launch_backward({dy, x, w_gate, w_down, w_up, zeros, finite, counted, as<float>(l1_scale), values, unions, tables,
                   memory, offsets, repeat},
                  address(dx), address(d_gate), address(d_up), address(d_down), float_weights, on);
  if (lies_by_neuron(given_down)) return {dx, d_gate, d_up, d_down};
  memory = Tensor();  // what comes next may lie there
  const Tensor as_weights = unwritten(x, {d_model, d_ff}, type);
  launch_transpose_of(d_down, address(as_weights), float_weights);
  return {dx, d_gate, d_up, as_weights};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def(TWELL_TRAIN
        "_call(Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? counted, "
        "SymInt capacity, SymInt whole_from, SymInt[] offsets, SymInt bytes) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(TWELL_TRAIN
        "_call_backward(Tensor dy, Tensor? d_l1, Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor finite, "
        "Tensor? counted, Tensor values, Tensor unions, Tensor tables, Tensor counted_rows, "
        "SymInt[] offsets, SymInt[] repeat, SymInt bytes, bool float_weights) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) {
  m.impl(TWELL_TRAIN "_call", TORCH_BOX(&forward));
  m.impl(TWELL_TRAIN "_call_backward", TORCH_BOX(&backward));
}
