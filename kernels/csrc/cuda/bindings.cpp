// The launches as a torch op. The host checks are in kernels/params.py and kernels/backends/cuda.py.
#include "common/bindings.h"
#include "cuda/params.h"

namespace {

using namespace twell;
using twell::cuda::Ffn;
using twell::cuda::Packed;

// The op's arguments, in the order of its schema.
struct Arguments {
  using Fields = decltype(joined(
      FfnTensors::Fields{}, WorkspaceTensor::Fields{},
      Types<Tensor, Tensor, Tensor, Maybe, Maybe, Maybe, int64_t, int64_t, bool, bool, int64_t, int64_t, int64_t>{},
      CountTensors::Fields{}));
  FfnTensors tensors;
  WorkspaceTensor workspace;
  Tensor values;      // values of what fired, each at its own column
  Tensor y, finite;   // [n, d_model]; bool [n], ones
  Maybe used;         // int32 [n], zeros: with up_relu, the products that are not zero
  Maybe words;        // int32 [rows, tiles, words of a tile]: TwELL, where it is requested
  Maybe spill_index;  // int32 [rows, tiles], likewise
  int64_t row, rows;  // the rows of this pass, of n: how many, from which on
  bool relu2, up_relu;
  int64_t block;  // rows that share a union: 16 or 64
  int64_t tile;   // columns of a tile in the counts and in `words`
  int64_t stages;
  CountTensors counts;
};

// The launches' parameters. `tensors` must outlive them.
Ffn ffn_of(const Arguments& a, const FfnTensors& tensors) {
  Ffn f{};
  tensors.put_into(f, a.y, a.finite, a.row, a.rows);
  f.words = (f.d_ff + 31) / 32, f.pitch = a.values.size(1), f.block = a.block;
  f.blocks = (f.rows + f.block - 1) / f.block;
  f.relu2 = a.relu2, f.up_relu = a.up_relu;
  a.workspace.point(f.masks, f.lists, f.sizes, f.hidden, f.tasks);
  f.values = address(a.values), f.used = as<int>(a.used, a.row);
  return f;
}

void ffn(Arguments a) {
  const DeviceGuard guard(a.tensors.x.get_device_index());
  const FfnTensors tensors = a.tensors.readable();
  const Ffn f = ffn_of(a, tensors);
  const StageSet stages{a.stages};
  const Counts counts = a.counts.from(a.row);
  const cudaStream_t stream = stream_of(tensors.x);
  by_type(tensors.x, [&]<typename T>() {
    using namespace twell::cuda;
    if (stages.has(Stage::kGate)) launch_gate<T>(f, stream);
    if (stages.has(Stage::kPlan)) launch_plan(f, stream);
    if (stages.has(Stage::kUp) && f.w_up != nullptr) launch_up<T>(f, stream);
    if (stages.has(Stage::kDown)) launch_down<T>(f, stream);
    if (stages.has(Stage::kCounts) && counts.nnz != nullptr) launch_counts<T>(f, counts, a.tile, stream);
    if (stages.has(Stage::kPack) && a.words) {
      const Packed packed{static_cast<int>(a.tile), static_cast<int>(a.words->size(2)),
                          static_cast<int>(a.words->size(1)), as<uint32_t>(a.words), as<int>(a.spill_index)};
      launch_pack(f, packed, stream);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def("cuda_ffn(" TWELL_FFN_SCHEMA
        "Tensor(a!) workspace, SymInt[] offsets, Tensor(b!) values, Tensor(c!) y, Tensor(d!) finite, "
        "Tensor(e!)? used, Tensor(f!)? words, Tensor(g!)? spill_index, SymInt row, SymInt rows, "
        "bool relu2, bool up_relu, int block, int tile, int stages, " TWELL_COUNTS_SCHEMA ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) { m.impl("cuda_ffn", TORCH_BOX((&ByPosition<ffn, Arguments>::call))); }
