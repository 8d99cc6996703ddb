#include "hopper/down.cuh"
#include "hopper/launch.cuh"

namespace twell::hopper {

template <>
void launch_down<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  const auto w = tensor_map<TWELL_T>(f.w_down, f.d_ff, f.d_model, kTileK);
  launch(down<TWELL_T>, std::min(multiprocessors(), f.blocks * down_tasks(f)), kThreads, kSharedBytes, stream, w, f);
}

}  // namespace twell::hopper
