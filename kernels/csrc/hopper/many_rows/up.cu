#include "hopper/many_rows/up.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

template <>
void launch_up<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  const auto x = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, kTileM);
  const auto w = tensor_map<TWELL_T>(f.w_up, f.d_ff, f.d_model, kPanelColumns);
  const auto spill = tensor_map<TWELL_T>(f.spill, f.rows, f.tiles * kTile, kTileM / 2, false);
  launch_overlapping(up<TWELL_T>, std::min(multiprocessors(), f.blocks * f.panels), kThreads, kSharedBytes, 1, stream,
                     x, w, spill, f);
}

}  // namespace twell::hopper
