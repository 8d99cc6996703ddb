#include "hopper/many_rows/gate.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

namespace {

// Zeros the memory that the gate product adds to. It is a kernel because what follows a memset in a stream does not
// overlap it.
__global__ void __launch_bounds__(1024) clear(uint32_t* words, int many) {
  let_next_launch();
  wait_for_launches();
  for (int i = blockIdx.x * 1024 + threadIdx.x; i < many; i += gridDim.x * 1024) words[i] = 0;
}

void launch_clear(uint32_t* words, int many, cudaStream_t stream) {
  launch_overlapping(clear, std::clamp(many / 1024, 1, 32), 1024, 0, 1, stream, words, many);
}

}  // namespace

template <>
void launch_gate<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  const auto x = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, kTileM);
  const auto half_x = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, kTileM / 2);
  const auto w = tensor_map<TWELL_T>(f.w_gate, f.d_ff, f.d_model, kTileN / 2);
  const auto up = f.w_up != nullptr ? tensor_map<TWELL_T>(f.w_up, f.d_ff, f.d_model, kTileN / 2) : w;
  const auto spill = tensor_map<TWELL_T>(f.spill, f.rows, f.tiles * kTile, kTileM / 2, false);
  const int pairs = DensePairs::count(f);
  launch_clear(f.row_sums, f.rows + 1 + (f.dense_tiles != nullptr ? DensePairs::words(f) : 0), stream);
  launch_overlapping(gate<TWELL_T>, 2 * std::min(multiprocessors() / 2, 2 * pairs), kThreads, kSharedBytes, 2, stream,
                     x, half_x, w, up, spill, f);
}

}  // namespace twell::hopper
