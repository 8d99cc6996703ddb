#include "common/launch.cuh"
#include "cuda/plan.cuh"
#include "cuda/probes.cuh"

namespace twell::cuda {

void launch_plan(const Ffn& f, cudaStream_t stream) {
  with_block(f, [&]<typename S>() {
    // then a warp has one thing to lay out
    const int most = (S::kM * ((f.words + 31) / 32) + kPlanWarps - 1) / kPlanWarps;
    const int split = std::clamp(4 * multiprocessors() / f.blocks, 1, most);
    launch(plan<S::kM>, dim3(f.blocks, split), kPlanThreads, plan_shared_bytes(f.words), stream, f, S::kN);
  });
}

void launch_pack(const Ffn& f, const Packed& p, cudaStream_t stream) {
  const int64_t warps = static_cast<int64_t>(f.rows) * ((p.tiles * (p.tile / 32) + 31) / 32);
  launch(pack, (warps + kCountThreads / 32 - 1) / (kCountThreads / 32), kCountThreads, 0, stream, f, p);
}

}  // namespace twell::cuda
