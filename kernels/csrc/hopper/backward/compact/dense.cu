#include "hopper/backward/compact/dense.cuh"

#include "hopper/backward/bias_sums.cuh"

namespace twell::hopper {

template <>
void launch_dense_values<TWELL_T>(const CompactBackward& b, bool by_neuron, cudaStream_t stream) {
  const auto map = [&](const void* matrix, int height) {
    return tensor_map<TWELL_T>(matrix, height, b.d_model, kTileM);
  };
  static_assert(kDenseNeurons == kTileM);
  const int tiles = by_neuron ? b.blocks * ((b.count + kDenseGroups - 1) / kDenseGroups)
                              : b.count * ((b.panels + kDenseGroups - 1) / kDenseGroups);
  launch_overlapping(by_neuron ? dense_values<TWELL_T, true> : dense_values<TWELL_T, false>,
                     std::min(multiprocessors(), tiles), kThreads, kSharedBytes, 1, stream, map(b.x, b.rows),
                     map(b.dy, b.rows), map(b.w_gate, b.d_ff), map(b.w_up, b.d_ff), map(b.w_down, b.d_ff), b);
}

template <>
void launch_dense_dx<TWELL_T>(const CompactBackward& b, cudaStream_t stream) {
  launch_product<DenseDxJob<TWELL_T>>(b, stream);
}

template <>
void launch_dense_weights<TWELL_T>(const CompactBackward& b, cudaStream_t stream) {
  launch_weights_product<DenseWeightsJob<TWELL_T, float>, DenseWeightsJob<TWELL_T, TWELL_T>>(b, stream);
}

template <>
void launch_dense_bias_sums<TWELL_T>(const CompactBackward& b, cudaStream_t stream) {
  launch_neuron_sums<DenseWeightsJob<TWELL_T, float>>(b, b.count, stream);
}

}  // namespace twell::hopper
