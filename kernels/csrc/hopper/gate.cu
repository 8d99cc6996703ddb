#include "hopper/clear.cuh"
#include "hopper/gate.cuh"

namespace twell::hopper {

template <>
void launch_gate<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  const auto x = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, kTileM);
  const auto half_x = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, kTileM / 2);
  const auto w = tensor_map<TWELL_T>(f.w_gate, f.d_ff, f.d_model, kTileN / 2);
  const int pairs = (f.blocks + 1) / 2 * f.tiles;
  launch_clear(f.row_sums, f.rows + 1, stream);
  launch_overlapping(gate<TWELL_T>, 2 * std::min(multiprocessors() / 2, 2 * pairs), kThreads, kSharedBytes, 2, stream, x, half_x, w, f);
}

}  // namespace twell::hopper
