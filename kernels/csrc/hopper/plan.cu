#include "hopper/launch.cuh"
#include "hopper/order.cuh"
#include "hopper/plan.cuh"

namespace twell::hopper {

template <>
void launch_plan<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  launch_overlapping(order, (f.rows + kWindow - 1) / kWindow * kOrderCtas, kOrderThreads, 0, kOrderCtas, stream, f);
  const int ctas = kPlanCtas * multiprocessors(), windows = (f.blocks * kBlockRows + kWindow - 1) / kWindow;
  const bool few = f.blocks <= ctas;
  const int shared = few ? f.blocks : windows, splits = few ? std::clamp(ctas / f.blocks, 1, kPlanSplits) : kLoudSplits;
  launch_overlapping(plan<TWELL_T>, f.blocks + shared * (splits - 1), kPlanThreads, plan_shared_bytes(f.tiles), 1, stream, f, shared,
                     splits, multiprocessors());
}

}  // namespace twell::hopper
