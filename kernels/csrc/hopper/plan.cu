#include "hopper/launch.cuh"
#include "hopper/plan.cuh"

namespace twell::hopper {

template <>
void launch_plan<TWELL_T>(const Ffn& f, bool first, cudaStream_t stream) {
  if (!first) check(cudaMemsetAsync(f.row_sums + f.rows, 0, sizeof(uint32_t), stream), "memset");
  const int ctas = kPlanCtas * multiprocessors(), windows = (f.blocks * kBlockRows + kWindow - 1) / kWindow;
  const bool few = f.blocks <= ctas;
  const int shared = few ? f.blocks : windows, splits = few ? std::clamp(ctas / f.blocks, 1, kPlanSplits) : kLoudSplits;
  launch_overlapping(plan<TWELL_T>, f.blocks + shared * (splits - 1), kPlanThreads, plan_shared_bytes(f.tiles), 1, stream, f, shared,
                     splits, multiprocessors());
}

}  // namespace twell::hopper
