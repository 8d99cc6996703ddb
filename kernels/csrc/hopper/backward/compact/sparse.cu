#include "hopper/backward/compact/jobs.cuh"
#include "hopper/backward/dh.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

template <>
void launch_compact_lists<TWELL_T>(const CompactBackward& b, cudaStream_t stream) {
  const int per_cta = kRankThreads / kRankShare;
  launch_overlapping(rank_neurons<CompactBackward>, (b.d_ff + per_cta - 1) / per_cta, kRankThreads, b.d_ff * 4, 1, stream, b);
  launch_overlapping(mark_tokens<CompactBackward>, b.blocks, kListThreads, b.panels * (16 + kPanelColumns * 2), 1, stream, b, multiprocessors());
  launch_overlapping(list_tokens<CompactBackward>, b.panels, kListThreads, 0, 1, stream, b);
  launch_overlapping(place_compact_values, b.blocks + 2 * multiprocessors(), kListThreads, (b.panels * 9 + 1) * 4, 1, stream, b);
}

template <>
void launch_compact_dh<TWELL_T>(const CompactBackward& b, cudaStream_t stream) {
  const Ffn f = product_of_dh(b);
  const auto dy = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, kTileM);
  const auto w = tensor_map<TWELL_T>(f.w_up, f.d_ff, f.d_model, kPanelColumns);
  launch_overlapping(dh<TWELL_T, CompactBackward>, std::min(multiprocessors(), f.blocks * f.panels), kThreads, kSharedBytes, 1, stream, dy, w, f, b);
}

template <>
void launch_compact_dx<TWELL_T>(const CompactBackward& b, cudaStream_t stream) {
  launch_overlapping(gathered_product<CompactDxJob<TWELL_T>>, std::min(multiprocessors(), kMostCtas), kThreads, kProductSharedBytes, 1, stream, b);
}

template <>
void launch_compact_weights<TWELL_T>(const CompactBackward& b, cudaStream_t stream) {
  const auto run = b.float_weights ? gathered_product<CompactWeightsJob<TWELL_T, float>> : gathered_product<CompactWeightsJob<TWELL_T, TWELL_T>>;
  launch_overlapping(run, std::min(multiprocessors(), kMostCtas), kThreads, kProductSharedBytes, 1, stream, b);
}

}  // namespace twell::hopper
