#include "hopper/backward/dh.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

template <>
void launch_dh<TWELL_T>(const Backward& b, cudaStream_t stream) {
  Ffn f{};
  f.rows = b.rows, f.d_model = b.d_model, f.d_ff = b.d_ff, f.blocks = b.blocks, f.panels = b.panels;
  f.x = b.dy, f.w_up = b.w_down;
  f.order = b.kept.order, f.unions = b.kept.unions, f.union_sizes = b.kept.union_sizes;
  f.tasks = b.tasks, f.row_sums = b.task_count - f.rows;  // `up` reads their number from there
  const auto dy = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, kTileM);
  const auto w = tensor_map<TWELL_T>(f.w_up, f.d_ff, f.d_model, kPanelColumns);
  launch_overlapping(dh<TWELL_T, Backward>, std::min(multiprocessors(), f.blocks * f.panels), kThreads, kSharedBytes, 1, stream, dy, w, f, b);
}

}  // namespace twell::hopper
