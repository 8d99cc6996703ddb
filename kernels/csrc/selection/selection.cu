#include "selection/tile_scan.cuh"

#include "common/launch.cuh"

namespace twell::selection {

constexpr int kCtas = 8;  // of a multiprocessor, as many as run at once

template <>
void launch_scan<TWELL_T>(const Packed& packed, const Rows& rows, const Layer& layer, void* stream) {
  const int ctas = std::min(kCtas * multiprocessors(), (rows.n + kWarps - 1) / kWarps);
  if (rows.n > 0) launch(scan<TWELL_T>, ctas, kThreads, 0, static_cast<cudaStream_t>(stream), packed, rows, layer);
}

template <>
void launch_tile_scan<TWELL_T>(const Packed& packed, const Rows& rows, const Layer& layer, void* stream) {
  if (!reads_by_16_bytes(packed)) return launch_scan<TWELL_T>(packed, rows, layer, stream);
  if (rows.n == 0) return;
  const int bytes = tile_scan_bytes(packed.tile);
  if (bytes > 48 * 1024) allow_shared(scan_tiles<TWELL_T>, bytes);
  int ctas = 0;  // of a multiprocessor
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, scan_tiles<TWELL_T>, kTileThreads, bytes), "occupancy");
  const int most = (rows.n + kTileThreads - 1) / kTileThreads;
  const int groups = std::clamp(ctas * multiprocessors() / packed.tiles, 1, most);
  launch(scan_tiles<TWELL_T>, groups * packed.tiles, kTileThreads, bytes, static_cast<cudaStream_t>(stream), packed,
         rows, layer, groups);
}

template <>
void launch_windows<TWELL_T>(const Packed& packed, const Rows& rows, const Layer& layer, void* stream) {
  const int ctas = (layer.d_ff + kWarps - 1) / kWarps;
  launch(copy_windows<TWELL_T>, ctas, kThreads, 0, static_cast<cudaStream_t>(stream), packed, rows, layer);
}

}  // namespace twell::selection
