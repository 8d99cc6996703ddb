#include "common/launch.cuh"
#include "cuda/probes.cuh"

namespace twell::cuda {

template <>
void launch_counts<TWELL_T>(const Ffn& f, const Counts& out, int tile, cudaStream_t stream) {
  const int warps = kCountThreads / 32;
  const int grid = std::min(8 * multiprocessors(), (f.rows + warps - 1) / warps);
  launch(count_rows, grid, kCountThreads, 2 * (tile + 1) * 4, stream, f, out, tile);
  if (out.fires != nullptr) {
    const dim3 grid((f.rows + kSumRows - 1) / kSumRows, (f.words + kSumWords - 1) / kSumWords);
    launch(count_neurons<TWELL_T>, grid, kCountThreads, sizeof(NeuronSums), stream, f, out);
  }
}

}  // namespace twell::cuda
