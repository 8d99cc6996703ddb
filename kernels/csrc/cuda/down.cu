#include "common/launch.cuh"
#include "cuda/down.cuh"

namespace twell::cuda {

template <>
void launch_down<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  with_block(f, [&]<typename S>() {
    const int total = f.blocks * ((f.d_model + S::kN - 1) / S::kN),
              grid = std::min(total, S::kCtas * multiprocessors());
    launch(down<TWELL_T, S>, grid, S::kThreads, S::kSharedBytes, stream, f, total);
  });
}

}  // namespace twell::cuda
