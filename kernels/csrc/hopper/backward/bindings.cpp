// The training passes as torch ops. The host checks are in kernels/training.py and kernels/backends/hopper_backward.py.
#include "hopper/backward/whole_calls/tensors.h"

namespace {

using namespace twell;
using namespace twell::hopper;
// offsets: as for ffn_of and rows_of_pass; capacity: of values; whole_from: as in Kept, if values has room for g and h.
void forward(const Tensor& given_x, const Tensor& given_gate, const Maybe& given_up, const Tensor& given_down,
             const Maybe& counted, const Tensor& workspace, const Offsets& offsets, const Tensor& y,
             const Tensor& finite, const Tensor& nnz, const Tensor& values, const Tensor& unions, const Tensor& tables,
             const Tensor& l1_parts, int64_t capacity, int64_t whole_from, const Maybe& b_gate, const Maybe& b_up,
             const Maybe& b_down) {
  const DeviceGuard guard(given_x.get_device_index());
  const Tensor x = aligned(given_x), w_gate = aligned(given_gate), w_down = by_neuron(given_down);
  const Maybe w_up = aligned(given_up);
  Ffn f = ffn_of(x, w_gate, w_up, w_down, workspace, offsets);
  const Maybe of_gate = aligned(b_gate), of_up = aligned(b_up), of_down = aligned(b_down);
  f.b_gate = address(of_gate), f.b_up = address(of_up), f.b_down = address(of_down);
  f.y = address(y), f.finite = as<uint8_t>(finite), f.nnz = as<int>(nnz);
  Kept kept = kept_of(values, capacity, unions, tables, f.rows, f.panels, f.d_ff, as<float>(l1_parts));
  kept.whole_from = static_cast<int>(whole_from);
  const int pass = rows_of_pass(offsets, f.rows);
  launch_first(f, kept.fires, pass, stream_of(x));
  launch_rest(f, kept, as<uint8_t>(counted), pass, stream_of(x));
}

// Offsets, adds and gradients of biases as in BackwardTensors; the down bias is not read.
void backward(const Tensor& given_dy, const Tensor& given_x, const Tensor& given_gate, const Maybe& given_up,
              const Tensor& given_down, const Tensor& finite, const Maybe& counted, const Tensor& l1_scale,
              const Tensor& values, const Tensor& unions, const Tensor& tables, const Tensor& workspace,
              const Offsets& offsets, const Offsets& repeat, const Tensor& dx, const Tensor& d_gate, const Tensor& d_up,
              const Tensor& d_down, bool adds, bool adds_down, const Maybe& b_gate, const Maybe& b_up, const Maybe&,
              const Maybe& d_b_gate, const Maybe& d_b_up, const Maybe& d_b_down) {
  const DeviceGuard guard(given_x.get_device_index());
  const Tensor dy = aligned(given_dy), x = aligned(given_x), w_gate = aligned(given_gate),
               w_down = by_neuron(given_down);
  const Maybe w_up = aligned(given_up), zeros = zeros_without(w_up, w_gate);
  const bool float_weights = d_gate.scalar_type() == torch::headeronly::ScalarType::Float;
  BackwardTensors tensors{dy,     x,      w_gate, w_down,    w_up,    zeros, finite, counted, as<float>(l1_scale),
                          values, unions, tables, workspace, offsets, repeat};
  tensors.b_gate = aligned(b_gate), tensors.b_up = aligned(b_up);
  tensors.d_b_gate = d_b_gate, tensors.d_b_up = d_b_up, tensors.d_b_down = d_b_down;
  tensors.adds = adds, tensors.adds_down = adds_down;
  launch_backward(tensors, address(dx), address(d_gate), address(d_up), address(d_down), float_weights, stream_of(x));
}

// from: [rows, columns], float32 or bfloat16; to: [columns, rows], bfloat16, or float32 from float32.
void transpose(const Tensor& given, const Tensor& to) {
  const DeviceGuard guard(given.get_device_index());
  const Tensor from = aligned(given);
  launch_transpose_of(from, address(to), to.scalar_type() == torch::headeronly::ScalarType::Float);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def(TWELL_TRAIN
        "_forward(Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? counted, "
        "Tensor(a!) workspace, SymInt[] offsets, Tensor(b!) y, Tensor(c!) finite, Tensor(d!) nnz, "
        "Tensor(e!) values, Tensor(f!) unions, Tensor(g!) tables, Tensor(h!) l1_parts, "
        "SymInt capacity, SymInt whole_from, Tensor? b_gate, Tensor? b_up, Tensor? b_down) -> ()");
  m.def(TWELL_TRAIN
        "_backward(Tensor dy, Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor finite, Tensor? counted, "
        "Tensor l1_scale, Tensor values, Tensor unions, Tensor tables, Tensor(a!) workspace, SymInt[] offsets, "
        "SymInt[] repeat, Tensor(b!) dx, Tensor(c!) d_gate, Tensor(d!) d_up, Tensor(e!) d_down, "
        "bool adds, bool adds_down, Tensor? b_gate, Tensor? b_up, Tensor? b_down, "
        "Tensor(f!)? d_b_gate, Tensor(g!)? d_b_up, Tensor(h!)? d_b_down) -> ()");
#ifndef TWELL_RELU2  // one library has it
  m.def("hopper_transpose(Tensor from, Tensor(a!) to) -> ()");
#endif
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) {
  m.impl(TWELL_TRAIN "_forward", TORCH_BOX(&forward));
  m.impl(TWELL_TRAIN "_backward", TORCH_BOX(&backward));
#ifndef TWELL_RELU2
  m.impl("hopper_transpose", TORCH_BOX(&transpose));
#endif
}
