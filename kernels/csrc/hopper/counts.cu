#include "hopper/counts.cuh"
#include "hopper/launch.cuh"

namespace twell::hopper {

template <>
void launch_counts<TWELL_T>(const Ffn& f, const Counts& out, cudaStream_t stream) {
  const int warps = kCountThreads / 32;
  launch(count_rows, std::min(8 * multiprocessors(), (f.rows + warps - 1) / warps), kCountThreads, 0, stream, f, out);
  if (out.fires != nullptr) {
    const dim3 grid((f.rows + Sums::kRows - 1) / Sums::kRows, (f.tiles + kSumTiles - 1) / kSumTiles);
    launch(count_neurons<TWELL_T>, grid, kCountThreads, sizeof(Sums), stream, f, out);
  }
}

}  // namespace twell::hopper
