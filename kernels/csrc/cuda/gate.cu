#include "common/launch.cuh"
#include "cuda/gate.cuh"

namespace twell::cuda {

template <>
void launch_gate<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  with_rows(f, [&]<typename S>() {
    const int total = (f.rows + S::kM - 1) / S::kM * ((f.d_ff + S::kN - 1) / S::kN);
    const int grid = std::min(total, S::kCtas * multiprocessors());
    launch(f.relu2 ? gate<TWELL_T, S, true> : gate<TWELL_T, S, false>, grid, S::kThreads, S::kSharedBytes, stream, f,
           total);
  });
}

}  // namespace twell::cuda
