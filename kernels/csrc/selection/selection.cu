#include "selection/selection.cuh"

#include "common/launch.cuh"

namespace twell::selection {

constexpr int kCtas = 8;  // of a multiprocessor, as many as run at once

template <>
void launch_scan<TWELL_T>(const Packed& packed, const Rows& rows, const Layer& layer, void* stream) {
  const int ctas = std::min(kCtas * multiprocessors(), (rows.n + kWarps - 1) / kWarps);
  if (rows.n > 0)
    launch(scan<TWELL_T>, ctas, kThreads, 0, static_cast<cudaStream_t>(stream), packed, rows, layer);
}

template <>
void launch_windows<TWELL_T>(const Packed& packed, const Rows& rows, const Layer& layer, void* stream) {
  const int ctas = (layer.d_ff + kWarps - 1) / kWarps;
  launch(copy_windows<TWELL_T>, ctas, kThreads, 0, static_cast<cudaStream_t>(stream), packed, rows, layer);
}

}  // namespace twell::selection
