#include "hopper/launch.cuh"
#include "hopper/plan.cuh"

namespace twell::hopper {

template <>
void launch_plan<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  launch(plan<TWELL_T>, f.blocks, kPlanThreads, plan_shared_bytes(f.tiles), stream, f);
}

}  // namespace twell::hopper
