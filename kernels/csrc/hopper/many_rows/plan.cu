#include "hopper/many_rows/plan.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

template <>
void launch_plan<TWELL_T>(const Ffn& f, bool first, cudaStream_t stream) {
  if (!first) check(cudaMemsetAsync(f.row_sums + f.rows, 0, sizeof(uint32_t), stream), "memset");
  const int ctas = kPlanCtas * multiprocessors(), windows = (f.blocks * kBlockRows + kWindow - 1) / kWindow;
  const int splits = std::clamp(ctas / (f.blocks + windows), 1, kPlanSplits), others = (f.blocks - windows) * splits;
  const int high_nnz_splits =
      std::clamp((ctas - others) / windows, std::max(splits, kMinHighNnzSplits), kMaxHighNnzSplits);
  launch_overlapping(plan<TWELL_T>, windows * high_nnz_splits + others, kPlanThreads, plan_shared_bytes(f.tiles), 1,
                     stream, f, windows, high_nnz_splits, splits, multiprocessors());
}

}  // namespace twell::hopper
