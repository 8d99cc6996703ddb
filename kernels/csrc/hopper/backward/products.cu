#include "hopper/backward/bias_sums.cuh"
#include "hopper/backward/dx.cuh"
#include "hopper/backward/weights.cuh"
#include "hopper/transpose.cuh"

namespace twell::hopper {

template <>
void launch_token_lists<TWELL_T>(const Backward& b, cudaStream_t stream) {
  launch_lists_of(b, stream);
  launch_overlapping(place_values, b.blocks + b.panels * kZeroSlices, kListThreads, b.panels * 32, 1, stream, b);
}

template <>
void launch_dx<TWELL_T>(const Backward& b, cudaStream_t stream) {
  launch_product<DxJob<TWELL_T>>(b, stream);
}

template <>
void launch_weights<TWELL_T>(const Backward& b, cudaStream_t stream) {
  launch_weights_product<WeightsJob<TWELL_T, float>, WeightsJob<TWELL_T, TWELL_T>>(b, stream);
}

template <>
void launch_bias_sums<TWELL_T>(const Backward& b, cudaStream_t stream) {
  launch_neuron_sums<WeightsJob<TWELL_T, float>>(b, b.panels, stream);
}

template <>
void launch_output_sums<TWELL_T>(const Backward& b, cudaStream_t stream) {
  launch_column_sums<TWELL_T>({b.dy, b.d_b_down, b.rows, b.d_model, b.float_weights, b.finite, nullptr, 0}, stream);
}

template <typename From, typename To>
void launch_transpose(const void* from, void* to, int rows, int columns, cudaStream_t stream) {
  const dim3 squares((columns + kTransposeEdge - 1) / kTransposeEdge, (rows + kTransposeEdge - 1) / kTransposeEdge);
  launch(transpose<From, To>, squares, kTransposeThreads, 0, stream, static_cast<const From*>(from),
         static_cast<To*>(to), rows, columns);
}

template void launch_transpose<float, float>(const void*, void*, int, int, cudaStream_t);
template void launch_transpose<float, TWELL_T>(const void*, void*, int, int, cudaStream_t);
template void launch_transpose<TWELL_T, TWELL_T>(const void*, void*, int, int, cudaStream_t);

}  // namespace twell::hopper
