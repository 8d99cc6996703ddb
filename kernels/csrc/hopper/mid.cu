#include "hopper/launch.cuh"
#include "hopper/mid_down.cuh"
#include "hopper/mid_gate_up.cuh"

namespace twell::hopper {

template <>
void launch_mid_gate_up<TWELL_T>(const Ffn& f, bool dense, cudaStream_t stream) {
  const int width = mid_width(f, multiprocessors());
  const auto run = [&]<int kN>() {
    using Where = MidRing<kN>;
    const auto x = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, kBlockRows), gate = tensor_map<TWELL_T>(f.w_gate, f.d_ff, f.d_model, kN);
    const auto up = f.w_up == nullptr ? gate : tensor_map<TWELL_T>(f.w_up, f.d_ff, f.d_model, kN);
    launch_overlapping(mid_gate_up<TWELL_T, kN>, dim3((f.d_ff + kN - 1) / kN, f.blocks), kThreads, Where::kBegin + Where::kBytes + 1024, 1, stream,
                       x, gate, up, f, dense);
  };
  if (width == 48)
    run.template operator()<48>();
  else if (width == 96)
    run.template operator()<96>();
  else if (width == 128)
    run.template operator()<128>();
  else
    run.template operator()<176>();
}

template <>
void launch_mid_down<TWELL_T>(const Ffn& f, int* nnz, cudaStream_t stream) {
  const int width = mid_width(f, multiprocessors()), tiles = (f.d_ff + width - 1) / width;
  const auto run = [&]<int kOut, int kSplits>() {
    using Down = MidDown<kOut, kSplits>;
    const int stages = Down::stages(f.d_ff);
    if (stages < Down::kLeastStages) throw std::runtime_error("down: d_ff of " + std::to_string(f.d_ff) + " leaves no room for stages");
    const auto w = tensor_map<TWELL_T>(f.w_down, f.d_ff, f.d_model, kTileK);
    const auto h = tensor_map<TWELL_T>(f.hidden, f.blocks * f.panels * kPanelColumns, kBlockRows, kTileK);
    launch_overlapping(mid_down<TWELL_T, kOut, kSplits>, dim3(kSplits, (f.d_model + kOut - 1) / kOut, f.blocks), kThreads,
                       stages * Down::kStageBytes + Down::list_bytes(f.d_ff) + 1024, kSplits, stream, w, h, f, nnz, tiles, stages);
  };
  const int tasks = f.blocks * ((f.d_model + 63) / 64);  // of 64 outputs
  if (tasks <= 32)
    run.template operator()<64, 4>();
  else if (tasks <= 64)
    run.template operator()<64, 2>();
  else if (tasks <= 128)
    run.template operator()<128, 2>();
  else if (tasks <= 256 || f.d_ff > 16384)  // the longer a union, the larger a CTA's list of it
    run.template operator()<256, 2>();
  else
    run.template operator()<256, 1>();
}

}  // namespace twell::hopper
