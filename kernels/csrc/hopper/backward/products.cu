#include "hopper/backward/dx.cuh"
#include "hopper/backward/weights.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

template <typename Job>
void launch_product(const Backward& b, cudaStream_t stream) {
  launch_overlapping(gathered_product<Job>, std::min(multiprocessors(), kMostCtas), kThreads, kProductSharedBytes, 1, stream, b);
}

template <>
void launch_dx<TWELL_T>(const Backward& b, cudaStream_t stream) {
  launch_product<DxJob<TWELL_T>>(b, stream);
}

template <>
void launch_weights<TWELL_T>(const Backward& b, cudaStream_t stream) {
  for (Backward phase = b; phase.phase < b.phases; ++phase.phase)
    if (b.float_weights)
      launch_product<WeightsJob<TWELL_T, float>>(phase, stream);
    else
      launch_product<WeightsJob<TWELL_T, TWELL_T>>(phase, stream);
}

}  // namespace twell::hopper
