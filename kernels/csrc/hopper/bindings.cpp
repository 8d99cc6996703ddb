// The launches as torch ops. The host checks are in kernels/params.py and kernels/backends/hopper.py.
#include <algorithm>
#include <array>
#include <cstring>

#include "common/bindings.h"
#include "common/device.h"
#include "hopper/dispatch.h"

namespace {

using namespace twell;
using twell::hopper::Ffn;

// The op of this library, of which there is one for each activation: the flags are those of activation.cuh.
#if defined(TWELL_RELU2) && defined(TWELL_UP_RELU)
#define TWELL_OP "hopper_relu2_up_relu_ffn"
#elif defined(TWELL_RELU2)
#define TWELL_OP "hopper_relu2_ffn"
#elif defined(TWELL_UP_RELU)
#define TWELL_OP "hopper_up_relu_ffn"
#else
#define TWELL_OP "hopper_ffn"
#endif

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

// The op's arguments, in the order of its schema.
struct Arguments {
  using Fields =
      decltype(joined(FfnTensors::Fields{}, WorkspaceTensor::Fields{},
                      Types<Tensor, Tensor, Maybe, Maybe, int64_t, int64_t, bool, int64_t>{}, CountTensors::Fields{}));
  FfnTensors tensors;
  WorkspaceTensor workspace;
  Tensor y, finite;   // [n, d_model]; bool [n]
  Maybe nnz_used;     // int32 [n], zeros: with a ReLU on the up branch too, how many products are not zero
  Maybe added;        // [n, d_model], contiguous: is added to y once that is rounded, as a residual is
  int64_t row, rows;  // the rows of this pass, of n: how many, from which on
  bool planned;       // whether this many rows have an order and a plan
  int64_t stages;
  CountTensors counts;
};

// The parameters that a call's shape and weights set: all but the rows that it reads, and what it writes.
Ffn shape_of(const FfnTensors& tensors, int64_t rows, bool planned, StageSet stages) {
  using namespace twell::hopper;
  Ffn f{};
  tensors.put_weights_into(f);
  f.rows = rows, f.planned = planned;
  f.tiles = (f.d_ff + kTile - 1) / kTile;
  f.panels = (f.d_ff + kPanelColumns - 1) / kPanelColumns;
  f.blocks = (f.rows + kBlockRows - 1) / kBlockRows;
  choose_rows16(f, {stages.has(Stage::kLeaveDense), stages.has(Stage::kNextWave), stages.has(Stage::kWideGroups)},
                multiprocessors());
  return f;
}

// Points the buffers to their places in a workspace. offsets: in bytes; used: whether used products are counted
template <typename Place>
void place(Ffn& f, char* memory, const Place& offsets, StageSet stages, bool used) {
  using namespace twell::hopper;
  point(memory, offsets, f.heads, f.tails, f.masks, f.spill, f.fired, f.row_sums, f.order, f.unions, f.union_sizes,
        f.hidden, f.tasks, f.parts, f.part_ready);
  if (f.w_up != nullptr && f.blocks <= kDenseTileBlocks)
    f.dense_tiles = reinterpret_cast<int*>(f.row_sums + f.rows + 1);
  f.continues_with_up = f.dense_tiles != nullptr && stages.has(Stage::kUp) && !used;
}

// The launches' parameters. `tensors` must outlive them.
Ffn ffn_of(const Arguments& a, const FfnTensors& tensors) {
  const StageSet stages{a.stages};
  Ffn f = shape_of(tensors, a.rows, a.planned, stages);
  tensors.put_rows_into(f, a.y, a.finite, a.row, a.rows);
  f.added = as<uint16_t>(a.added, a.row * f.d_model);
  f.nnz = as<int>(a.counts.nnz, a.row), f.nnz_used = as<int>(a.nnz_used, a.row);
  place(f, as<char>(a.workspace.memory), a.workspace.offsets, stages, f.nnz_used != nullptr);
  return f;
}

// Gate and up in one launch, then down. Words (TwELL) are written only if more than nnz is requested: without a plan,
// the plan's stage stands for them.
template <typename T>
void launch_without_plan(const Ffn& f, StageSet stages, cudaStream_t stream) {
  using namespace twell::hopper;
  const bool words = stages.has(Stage::kPlan);
  const Launches launches = launches_of<T>(path_of(f, multiprocessors()));
  if (stages.has(Stage::kGate)) launches.gate_up(f, words, stream);
  if (words) launch_pack_words<T>(f, stream);
  if (stages.has(Stage::kDown)) launches.down(f, f.nnz, stream);
}

template <typename T>
void launch_planned(const Ffn& f, StageSet stages, cudaStream_t stream) {
  using namespace twell::hopper;
  if (stages.has(Stage::kGate)) launch_gate<T>(f, stream);
  if (stages.has(Stage::kPlan)) launch_plan<T>(f, stages.has(Stage::kGate), stream);
  if (stages.has(Stage::kUp) && f.w_up != nullptr) launch_up<T>(f, stream);
  if (stages.has(Stage::kDown)) launch_down<T>(f, stream);
}

template <typename T>
void launch(const Ffn& f, StageSet stages, cudaStream_t stream) {
  f.planned ? launch_planned<T>(f, stages, stream) : launch_without_plan<T>(f, stages, stream);
}

void ffn(Arguments a) {
  const OnDeviceOf there(a.tensors.x);
  const FfnTensors tensors = a.tensors.readable();
  a.added = aligned(a.added);
  const Ffn f = ffn_of(a, tensors);
  const StageSet stages{a.stages};
  const cudaStream_t stream = stream_of(tensors.x);
  by_type(tensors.x, [&]<typename T>() {
    launch<T>(f, stages, stream);
    if (stages.has(Stage::kDown) && f.nnz_used != nullptr) twell::hopper::launch_clear_used<T>(f, stream);
    if (stages.has(Stage::kCounts)) twell::hopper::launch_counts<T>(f, a.counts.from(a.row), stream);
  });
}

// What is known of a call in one pass before its rows come, so that the like of it can be run again: the host's time
// counts where that is used.
struct Prepared {
  Ffn f;                            // but the rows, the results and the workspace
  std::array<int64_t, 13> offsets;  // of the buffers in the workspace
  int64_t bytes;                    // of the workspace
  int64_t stages;
  bool counts;  // whether rows have an nnz
};

// Returns a Prepared as a tensor of bytes on the host, in which the weights are addresses. x: rows like those to come;
// the weights as the kernels read them, w_down by neuron.
Tensor prepare(Tensor x, Tensor w_gate, Maybe w_up, Tensor w_down, Maybe b_gate, Maybe b_up, Maybe b_down,
               Offsets offsets, int64_t bytes, int64_t rows, bool counts, bool planned) {
  const OnDeviceOf there(x);
  const FfnTensors tensors{x, w_gate, w_up, w_down, b_gate, b_up, b_down};
  Prepared call{};
  if (offsets.size() != call.offsets.size())
    throw std::runtime_error("offsets: expected " + std::to_string(call.offsets.size()) + ", got " +
                             std::to_string(offsets.size()));
  std::copy(offsets.begin(), offsets.end(), call.offsets.begin());
  call.bytes = bytes, call.counts = counts;
  call.stages =
      static_cast<int64_t>(Stage::kGate) | static_cast<int64_t>(Stage::kUp) | static_cast<int64_t>(Stage::kDown);
  if (planned) call.stages |= static_cast<int64_t>(Stage::kPlan);
  call.f = shape_of(tensors, rows, planned, {call.stages});
  const int64_t size = sizeof(Prepared), stride = 1;
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(), aoti_torch_device_type_cpu(), 0, &made));
  const Tensor prepared(made);
  std::memcpy(address(prepared), &call, sizeof call);
  return prepared;
}

// Runs such a call on x, contiguous, and returns y, nnz and finite.
std::tuple<Tensor, Tensor, Tensor> again(Tensor x, Tensor prepared) {
  if (prepared.numel() != sizeof(Prepared)) throw std::runtime_error("prepared: expected what the op _prepare returns");
  const Prepared& call = *as<const Prepared>(prepared);
  const int64_t rows = call.f.rows;
  x = aligned(x);
  const OnDeviceOf there(x);
  const Tensor y = unwritten(x), finite = unwritten(x, {rows}, aoti_torch_dtype_bool());
  const Tensor nnz = unwritten(x, {call.counts ? rows : 0}, aoti_torch_dtype_int32()),
               memory = unwritten(x, {call.bytes}, aoti_torch_dtype_uint8());
  Ffn f = call.f;
  f.x = address(x), f.y = address(y), f.finite = as<uint8_t>(finite);
  if (call.counts) f.nnz = as<int>(nnz);
  place(f, as<char>(memory), call.offsets, {call.stages}, false);
  by_type(x, [&]<typename T>() { launch<T>(f, {call.stages}, stream_of(x)); });
  return {y, nnz, finite};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def(TWELL_OP "(" TWELL_FFN_SCHEMA
                 "Tensor(a!) workspace, SymInt[] offsets, Tensor(b!) y, Tensor(c!) finite, Tensor(d!)? nnz_used, "
                 "Tensor? added, SymInt row, SymInt rows, bool planned, int stages, " TWELL_COUNTS_SCHEMA ") -> ()");
  m.def(TWELL_OP "_prepare(" TWELL_FFN_SCHEMA
                 "SymInt[] offsets, SymInt bytes, SymInt rows, bool counts, bool planned) -> Tensor");
  m.def(TWELL_OP "_again(Tensor x, Tensor prepared) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) {
  m.impl(TWELL_OP, TORCH_BOX((&ByPosition<ffn, Arguments>::call)));
  m.impl(TWELL_OP "_prepare", TORCH_BOX(&prepare));
  m.impl(TWELL_OP "_again", TORCH_BOX(&again));
}
