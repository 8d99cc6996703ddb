#include "hopper/probes/probes.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

template <>
void launch_counts<TWELL_T>(const Ffn& f, const Counts& out, cudaStream_t stream) {
  const auto run = [&](auto kernel, dim3 grid, int shared, const auto&... arguments) {
    if (f.planned)
      launch_overlapping(kernel, grid, kCountThreads, shared, 1, stream, arguments...);
    else
      launch(kernel, grid, kCountThreads, shared, stream, arguments...);  // `down` determines which rows are finite
  };
  if (out.pairs != nullptr) {
    const int ctas = std::min(8 * multiprocessors(), (f.rows + kCountWarps - 1) / kCountWarps);
    run(count_rows, ctas, 0, f, out);
  }
  if (out.fires != nullptr) {
    // As many CTAs as run at once, with several batches for each warp, and with no more rows than sums can hold.
    const int groups = (f.tiles + kSumTiles - 1) / kSumTiles,
              shares = std::max(1, kCountCtas * multiprocessors() / groups);
    const int batches = ((f.rows + shares - 1) / shares + kBatch - 1) / kBatch;
    const int rows = std::clamp(batches * kBatch, kCountWarps * kBatch, NeuronSums::kRows);
    run(count_neurons<TWELL_T>, dim3((f.rows + rows - 1) / rows, groups), sizeof(CountShared), f, out, rows);
  }
}

template <>
void launch_clear_used<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  launch(clear_used, (f.rows + kCountThreads - 1) / kCountThreads, kCountThreads, 0, stream, f);
}

}  // namespace twell::hopper
