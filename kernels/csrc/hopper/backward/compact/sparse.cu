#include "hopper/backward/bias_sums.cuh"
#include "hopper/backward/compact/jobs.cuh"
#include "hopper/backward/dh.cuh"

namespace twell::hopper {

template <>
void launch_compact_lists<TWELL_T>(const CompactBackward& b, cudaStream_t stream) {
  launch_lists_of(b, stream);
  launch_overlapping(place_compact_values, b.blocks + 2 * multiprocessors(), kListThreads, (b.panels * 9 + 1) * 4, 1,
                     stream, b);
}

template <>
void launch_compact_dh<TWELL_T>(const CompactBackward& b, cudaStream_t stream) {
  launch_dh_of<TWELL_T>(b, stream);
}

template <>
void launch_compact_dx<TWELL_T>(const CompactBackward& b, cudaStream_t stream) {
  launch_product<CompactDxJob<TWELL_T>>(b, stream);
}

template <>
void launch_compact_weights<TWELL_T>(const CompactBackward& b, cudaStream_t stream) {
  launch_weights_product<CompactWeightsJob<TWELL_T, float>, CompactWeightsJob<TWELL_T, TWELL_T>>(b, stream);
}

template <>
void launch_compact_bias_sums<TWELL_T>(const CompactBackward& b, cudaStream_t stream) {
  launch_neuron_sums<CompactWeightsJob<TWELL_T, float>>(b, b.panels, stream);
}

}  // namespace twell::hopper
