#include "hopper/many_rows/down.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

template <>
void launch_down<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  const auto w = tensor_map<TWELL_T>(f.w_down, f.d_ff, f.d_model, kTileK);
  const auto y = tensor_map<TWELL_T>(f.y, f.rows, f.d_model, kOutRows);
  if (f.blocks > kShareBlocks)
    launch_overlapping(down<TWELL_T>, std::min(multiprocessors(), f.blocks * down_tasks(f)), kThreads, kDownSharedBytes,
                       1, stream, w, y, f);
  else
    launch_overlapping(down<TWELL_T>, std::min(multiprocessors(), kParts) / kDownCluster * kDownCluster, kThreads,
                       kDownSharedBytes, kDownCluster, stream, w, y, f);
}

}  // namespace twell::hopper
