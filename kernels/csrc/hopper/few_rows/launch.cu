#include "hopper/few_rows/rows64_down.cuh"
#include "hopper/few_rows/rows64_gate_up.cuh"
#include "hopper/tma_launch.cuh"
#include "hopper/few_rows/rows16_down.cuh"
#include "hopper/few_rows/rows16_gate_up.cuh"

namespace twell::hopper {

namespace {

constexpr int kMostShared = 227 * 1024;  // bytes of shared memory to a CTA

// Calls run<tiles to a stage>().
template <typename Run>
void by_rows(int rows, Run run) {
  if (rows <= 32)
    run.template operator()<4>();
  else
    run.template operator()<2>();
}

// The same of tiles of eight rows, up to kThinRows.
template <typename Run>
void by_thin_rows(int rows, Run run) {
  if (rows <= 8)
    run.template operator()<1>();
  else
    run.template operator()<2>();
}

}  // namespace

template <>
void launch_thin_gate_up<TWELL_T>(const Ffn& f, bool dense, cudaStream_t stream) {
  by_thin_rows(f.rows, [&]<int kTiles>() {
    using Gate = ThinGate<kTiles>;
    const auto x = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, Gate::kRows);
    const auto gate = tensor_map<TWELL_T>(f.w_gate, f.d_ff, f.d_model, kThinNeurons);
    const auto up = f.w_up == nullptr ? gate : tensor_map<TWELL_T>(f.w_up, f.d_ff, f.d_model, kThinNeurons);
    const int ctas = (f.d_ff + kThinNeurons - 1) / kThinNeurons;
    launch_overlapping(thin_gate_up<TWELL_T, kTiles>, ctas, kThinThreads + 32, Gate::kBytes, 1, stream, x, gate, up, f, dense);
  });
}

template <>
void launch_thin_down<TWELL_T>(const Ffn& f, int* nnz, cudaStream_t stream) {
  by_thin_rows(f.rows, [&]<int kTiles>() {
    const auto w = tensor_map<TWELL_T>(f.w_down, f.d_ff, f.d_model, kThinNeurons);
    const dim3 grid(kThinSplits, (f.d_model + kThinOutputs - 1) / kThinOutputs);
    launch_overlapping(thin_down<TWELL_T, kTiles>, grid, kThinThreads, ThinDown<kTiles>::kBytes, kThinSplits, stream, w, f, nnz);
  });
}

template <>
void launch_few_gate_up<TWELL_T>(const Ffn& f, bool dense, cudaStream_t stream) {
  by_rows(f.rows, [&]<int kTiles>() {
    FewShape shape{0, (f.rows + 7) / 8 * 8, f.d_model % kTileK == 0, dense};
    const int bytes = kTiles * (kFewWeightBytes + shape.row_bytes());
    // The products read 64 rows from where a tile's rows begin, also where fewer lie there.
    const int rest = (sizeof(FewShared<kTiles>) + 1023) / 1024 * 1024 + kFewRows * kTileK * 2;
    shape.stages = std::min((kMostShared - rest) / bytes, kFewStages);
    const auto x = tiles_map<TWELL_T>(f.x, f.rows, f.d_model, shape.box, kTiles);
    const auto gate = tiles_map<TWELL_T>(f.w_gate, f.d_ff, f.d_model, kFewNeurons, kTiles);
    const auto up = f.w_up == nullptr ? gate : tiles_map<TWELL_T>(f.w_up, f.d_ff, f.d_model, kFewNeurons, kTiles);
    const int ctas = (f.d_ff + kFewNeurons - 1) / kFewNeurons;
    launch_overlapping(few_gate_up<TWELL_T, kTiles>, ctas, few_consumers(kTiles) + kFewProducers,
                       shape.stages * bytes + rest, 1, stream, x, gate, up, f, shape);
  });
}

template <>
void launch_few_down<TWELL_T>(const Ffn& f, int* nnz, cudaStream_t stream) {
  const int rest = DownSpace(f.d_ff).bytes, stages = std::min((226 * 1024 - rest) / kDownStageBytes, kFewStages);
  const auto w = tensor_map<TWELL_T>(f.w_down, f.d_ff, f.d_model, kTileK);
  const auto h = tensor_map<TWELL_T>(f.hidden, f.d_ff, kFewRows, kTileK);
  launch_overlapping(few_down<TWELL_T>, dim3(kDownSplits, (f.d_model + kDownOutputs - 1) / kDownOutputs), kDownConsumers + kDownProducers,
                     stages * kDownStageBytes + rest, kDownSplits, stream, w, h, f, nnz, stages);
}

template <>
void launch_few_pack<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  launch(few_pack<TWELL_T>, dim3(f.tiles, f.rows), 32, 0, stream, f);
}

}  // namespace twell::hopper
