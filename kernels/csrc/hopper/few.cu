#include "hopper/few.cuh"
#include "hopper/launch.cuh"

namespace twell::hopper {

template <>
void launch_few_gate_up<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  launch(few_gate_up<TWELL_T>, (f.d_ff + kFewNeurons - 1) / kFewNeurons, kFewThreads, 0, stream, f);
}

template <>
void launch_few_down<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  const dim3 grid((f.d_model + kDownOutputs - 1) / kDownOutputs, (f.rows + kDownRows - 1) / kDownRows);
  if (grid.y == 1)
    launch(few_down<TWELL_T, 16>, grid, 16 * 32, 0, stream, f);
  else  // twice as many CTAs: two to a multiprocessor
    launch(few_down<TWELL_T, 8>, grid, 8 * 32, 0, stream, f);
}

template <>
void launch_few_pack<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  launch(few_pack<TWELL_T>, dim3(f.tiles, f.rows), 32, 0, stream, f);
}

}  // namespace twell::hopper
