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
  if (b.float_weights)
    launch_product<WeightsJob<TWELL_T, float>>(b, stream);
  else
    launch_product<WeightsJob<TWELL_T, TWELL_T>>(b, stream);
}

}  // namespace twell::hopper
