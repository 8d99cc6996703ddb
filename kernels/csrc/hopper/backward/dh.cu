#include "hopper/backward/dh.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

template <>
void launch_dh<TWELL_T>(const Backward& b, cudaStream_t stream) {
  const Ffn f = product_of_dh(b);
  const auto dy = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, kTileM);
  const auto w = tensor_map<TWELL_T>(f.w_up, f.d_ff, f.d_model, kPanelColumns);
  launch_overlapping(dh<TWELL_T, Backward>, std::min(multiprocessors(), f.blocks * f.panels), kThreads, kSharedBytes, 1, stream, dy, w, f, b);
}

}  // namespace twell::hopper
