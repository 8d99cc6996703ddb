#include "hopper/launch.cuh"
#include "hopper/plan.cuh"

namespace twell::hopper {

template <>
void launch_plan<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  const int splits = std::clamp(multiprocessors() / f.blocks, 1, (f.panels + kGroup - 1) / kGroup);
  launch(plan<TWELL_T>, dim3(f.blocks, splits), kPlanThreads, plan_shared_bytes(f.tiles), stream, f, multiprocessors());
}

}  // namespace twell::hopper
