#include "hopper/backward/token_lists.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

template <>
void launch_token_lists<TWELL_T>(const Backward& b, cudaStream_t stream) {
  const int per_cta = kRankThreads / kRankShare;
  launch_overlapping(rank_neurons<Backward>, (b.d_ff + per_cta - 1) / per_cta, kRankThreads, b.d_ff * 4, 1, stream, b);
  launch_overlapping(mark_tokens<Backward>, b.blocks, kListThreads, b.panels * (16 + kPanelColumns * 2), 1, stream, b, multiprocessors());
  launch_overlapping(list_tokens<Backward>, b.panels, kListThreads, 0, 1, stream, b);
  launch_overlapping(place_values, b.blocks + b.panels * kZeroSlices, kListThreads, b.panels * 32, 1, stream, b);
}

}  // namespace twell::hopper
