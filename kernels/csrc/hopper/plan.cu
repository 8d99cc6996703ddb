#include "hopper/launch.cuh"
#include "hopper/order.cuh"
#include "hopper/plan.cuh"

namespace twell::hopper {

template <>
void launch_plan<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  if (f.blocks > 1) launch(order, (f.rows + kWindow - 1) / kWindow, kWindow, 0, stream, f);
  const int splits = std::clamp(kPlanCtas * multiprocessors() / f.blocks, 1, kPlanSplits);
  launch(plan<TWELL_T>, dim3(f.blocks, splits), kPlanThreads, plan_shared_bytes(f.tiles), stream, f, multiprocessors());
}

}  // namespace twell::hopper
