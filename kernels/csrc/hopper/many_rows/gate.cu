#include "hopper/many_rows/clear.cuh"
#include "hopper/many_rows/gate.cuh"

namespace twell::hopper {

template <>
void launch_gate<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  const auto x = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, kTileM);
  const auto half_x = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, kTileM / 2);
  const auto w = tensor_map<TWELL_T>(f.w_gate, f.d_ff, f.d_model, kTileN / 2);
  const auto up = f.w_up != nullptr ? tensor_map<TWELL_T>(f.w_up, f.d_ff, f.d_model, kTileN / 2) : w;
  const auto spill = tensor_map<TWELL_T>(f.spill, f.rows, f.tiles * kTile, kTileM / 2, false);
  const int pairs = DensePairs::count(f);
  launch_clear(f.row_sums, f.rows + 1 + (f.dense_tiles != nullptr ? DensePairs::words(f) : 0), stream);
  launch_overlapping(gate<TWELL_T>, 2 * std::min(multiprocessors() / 2, 2 * pairs), kThreads, kSharedBytes, 2, stream, x, half_x, w, up,
                     spill, f);
}

}  // namespace twell::hopper
