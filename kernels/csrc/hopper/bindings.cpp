// The launches as torch ops. The host checks are in kernels/params.py and kernels/backends/hopper.py.
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
  using Fields = decltype(joined(FfnTensors::Fields{}, WorkspaceTensor::Fields{}, Types<Tensor, Tensor, Maybe, Maybe, int64_t, int64_t, bool, int64_t>{},
                                 CountTensors::Fields{}));
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

// The launches' parameters. `tensors` must outlive them.
Ffn ffn_of(const Arguments& a, const FfnTensors& tensors) {
  using namespace twell::hopper;
  Ffn f{};
  tensors.put_into(f, a.y, a.finite, a.row, a.rows);
  f.planned = a.planned;
  f.tiles = (f.d_ff + kTile - 1) / kTile;
  f.panels = (f.d_ff + kPanelColumns - 1) / kPanelColumns;
  f.blocks = (f.rows + kBlockRows - 1) / kBlockRows;
  a.workspace.point(f.heads, f.tails, f.masks, f.spill, f.fired, f.row_sums, f.order, f.unions, f.union_sizes, f.hidden, f.tasks, f.parts,
                    f.part_ready);
  if (f.w_up != nullptr && f.blocks <= kDenseTileBlocks) f.dense_tiles = reinterpret_cast<int*>(f.row_sums + f.rows + 1);
  const StageSet stages{a.stages};
  f.added = as<uint16_t>(a.added, a.row * f.d_model);
  f.nnz = as<int>(a.counts.nnz, a.row), f.nnz_used = as<int>(a.nnz_used, a.row);
  f.continues_with_up = f.dense_tiles != nullptr && stages.has(Stage::kUp) && f.nnz_used == nullptr;
  choose_rows16(f, {stages.has(Stage::kLeaveDense), stages.has(Stage::kNextWave), stages.has(Stage::kWideGroups)}, multiprocessors());
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

void ffn(Arguments a) {
  const DeviceGuard guard(a.tensors.x.get_device_index());
  const FfnTensors tensors = a.tensors.readable();
  a.added = aligned(a.added);
  const Ffn f = ffn_of(a, tensors);
  const StageSet stages{a.stages};
  const cudaStream_t stream = stream_of(tensors.x);
  by_type(tensors.x, [&]<typename T>() {
    if (f.planned)
      launch_planned<T>(f, stages, stream);
    else
      launch_without_plan<T>(f, stages, stream);
    if (stages.has(Stage::kDown) && f.nnz_used != nullptr) twell::hopper::launch_clear_used<T>(f, stream);
    if (stages.has(Stage::kCounts)) twell::hopper::launch_counts<T>(f, a.counts.from(a.row), stream);
  });
}

// A call in one pass that makes its results and its workspace itself: one op in place of five, for callers whose time is
// the host's. x: [rows, d_model]; bytes: of the workspace. Returns y, finite and nnz.
std::tuple<Tensor, Tensor, Tensor> few_ffn(Tensor x, Tensor w_gate, Maybe w_up, Tensor w_down, Maybe b_gate, Maybe b_up, Maybe b_down,
                                           Offsets offsets, int64_t bytes, bool counts, bool planned) {
  const int64_t rows = x.size(0);
  int32_t type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &type));
  Tensor y = unwritten(x, {rows, x.size(1)}, type), finite = unwritten(x, {rows}, aoti_torch_dtype_bool());
  Tensor nnz = unwritten(x, {counts ? rows : 0}, aoti_torch_dtype_int32()), memory = unwritten(x, {bytes}, aoti_torch_dtype_uint8());
  CountTensors of_rows{};
  if (counts) of_rows.nnz = nnz;
  int64_t stages = static_cast<int64_t>(Stage::kGate) | static_cast<int64_t>(Stage::kUp) | static_cast<int64_t>(Stage::kDown);
  if (planned) stages |= static_cast<int64_t>(Stage::kPlan);
  ffn({{x, w_gate, w_up, w_down, b_gate, b_up, b_down}, {memory, offsets}, y, finite, {}, {}, 0, rows, planned, stages, of_rows});
  return {y, finite, nnz};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def(TWELL_OP "(" TWELL_FFN_SCHEMA
        "Tensor(a!) workspace, SymInt[] offsets, Tensor(b!) y, Tensor(c!) finite, Tensor(d!)? nnz_used, Tensor? added, SymInt row, SymInt rows, "
        "bool planned, int stages, " TWELL_COUNTS_SCHEMA ") -> ()");
  m.def(TWELL_OP "_few(" TWELL_FFN_SCHEMA "SymInt[] offsets, SymInt bytes, bool counts, bool planned) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) {
  m.impl(TWELL_OP, TORCH_BOX((&ByPosition<ffn, Arguments>::call)));
  m.impl(TWELL_OP "_few", TORCH_BOX(&few_ffn));
}
