#include "common/launch.cuh"
#include "cuda/up.cuh"

namespace twell::cuda {

template <>
void launch_up<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  with_block(f, [&]<typename S>() {
    const int most = f.blocks * ((f.d_ff + S::kN - 1) / S::kN), grid = std::min(most, S::kCtas * multiprocessors());
    launch(f.up_relu ? up<TWELL_T, S, true> : up<TWELL_T, S, false>, grid, S::kThreads, S::kSharedBytes, stream, f);
  });
}

}  // namespace twell::cuda
