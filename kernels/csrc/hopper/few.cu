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
  launch(few_down<TWELL_T>, grid, kDownThreads, 0, stream, f);
}

template <>
void launch_few_pack<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  launch(few_pack<TWELL_T>, dim3(f.tiles, f.rows), 32, 0, stream, f);
}

}  // namespace twell::hopper
