#include "hopper/few_rows/rows16_down.cuh"
#include "hopper/few_rows/rows16_gate_up.cuh"
#include "hopper/few_rows/rows64_down.cuh"
#include "hopper/few_rows/rows64_gate_up.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

namespace {

constexpr int kMaxSharedBytes = 227 * 1024;  // bytes of shared memory to a CTA

// Calls run<tiles to a stage>().
template <typename Run>
void by_rows64_tiles(int rows, Run run) {
  if (rows <= 32)
    run.template operator()<4>();
  else
    run.template operator()<2>();
}

// The same of tiles of eight rows, up to kRows16Max, and of the neurons of a group.
template <typename Run>
void by_rows16_tiles(const Ffn& f, Run run) {
  if (f.rows <= 8)
    f.wide_groups ? run.template operator()<1, kWideGroup>() : run.template operator()<1, kGroupNeurons>();
  else
    f.wide_groups ? run.template operator()<2, kWideGroup>() : run.template operator()<2, kGroupNeurons>();
}

// How many clusters of six CTAs of `rows64_down` run at once on this device.
int clusters_of_six() {
  return of_this_device([] {
    return clusters_at_once(rows64_down<TWELL_T, 6>, kDownConsumers + kDownProducers, kMaxSharedBytes - 1024, 6);
  });
}

}  // namespace

template <>
void launch_rows16_gate_up<TWELL_T>(const Ffn& f, bool dense, cudaStream_t stream) {
  by_rows16_tiles(f, [&]<int kTiles, int kNeurons>() {
    using Gate = Rows16Gate<kTiles, kNeurons>;
    const auto x = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, Gate::kRows);
    const auto gate = tensor_map<TWELL_T>(f.w_gate, f.d_ff, f.d_model, kNeurons);
    const auto up = f.w_up == nullptr ? gate : tensor_map<TWELL_T>(f.w_up, f.d_ff, f.d_model, kNeurons);
    const int ctas = (f.d_ff + kNeurons - 1) / kNeurons;
    launch_overlapping<true>(rows16_gate_up<TWELL_T, kTiles, kNeurons>, ctas, kRows16Threads + 32, Gate::kBytes, 1,
                             stream, x, gate, up, f, dense);
  });
}

template <>
void launch_rows16_down<TWELL_T>(const Ffn& f, int* nnz, cudaStream_t stream) {
  by_rows16_tiles(f, [&]<int kTiles, int kNeurons>() {
    const auto w = tensor_map<TWELL_T>(f.w_down, f.d_ff, f.d_model, kNeurons);
    const dim3 grid(kRows16Splits, (f.d_model + kRows16Outputs - 1) / kRows16Outputs);
    launch_overlapping<true>(rows16_down<TWELL_T, kTiles, kNeurons>, grid, kRows16Threads,
                             Rows16Down<kTiles, kNeurons>::kBytes, kRows16Splits, stream, w, f, nnz);
  });
}

template <>
void launch_rows64_gate_up<TWELL_T>(const Ffn& f, bool dense, cudaStream_t stream) {
  by_rows64_tiles(f.rows, [&]<int kTiles>() {
    Rows64Shape shape{0, (f.rows + 7) / 8 * 8, f.d_model % kTileK == 0, dense};
    const int bytes = kTiles * (kRows64WeightBytes + shape.row_bytes());
    // The products read 64 rows from the start of a tile's rows, also if fewer exist.
    const int rest = (sizeof(Rows64Shared<kTiles>) + 1023) / 1024 * 1024 + kRows64Max * kTileK * 2;
    shape.stages = std::min(
        {(kMaxSharedBytes - rest) / bytes, kRows64Stages, (f.d_model + kTiles * kTileK - 1) / (kTiles * kTileK)});
    const auto x = tiles_map<TWELL_T>(f.x, f.rows, f.d_model, shape.box, kTiles);
    const auto gate = tiles_map<TWELL_T>(f.w_gate, f.d_ff, f.d_model, kGroupNeurons, kTiles);
    const auto up = f.w_up == nullptr ? gate : tiles_map<TWELL_T>(f.w_up, f.d_ff, f.d_model, kGroupNeurons, kTiles);
    const int ctas = (f.d_ff + kGroupNeurons - 1) / kGroupNeurons;
    launch_overlapping(rows64_gate_up<TWELL_T, kTiles>, ctas, rows64_consumers(kTiles) + kRows64Producers,
                       shape.stages * bytes + rest, 1, stream, x, gate, up, f, shape);
  });
}

template <>
void launch_rows64_down<TWELL_T>(const Ffn& f, int* nnz, cudaStream_t stream) {
  const int tasks = (f.d_model + kDownOutputs - 1) / kDownOutputs;
  const auto run = [&]<int kSplits>() {
    const int rest = DownSpace<kSplits>(f.d_ff).bytes,
              stages = std::min((226 * 1024 - rest) / kDownStageBytes, kRows64Stages);
    const auto w = tensor_map<TWELL_T>(f.w_down, f.d_ff, f.d_model, kTileK);
    const auto h = tensor_map<TWELL_T>(f.hidden, f.d_ff, kRows64Max, kTileK);
    launch_overlapping(rows64_down<TWELL_T, kSplits>, dim3(kSplits, tasks), kDownConsumers + kDownProducers,
                       stages * kDownStageBytes + rest, kSplits, stream, w, h, f, nnz, stages);
  };
  tasks <= clusters_of_six() ? run.template operator()<6>() : run.template operator()<3>();
}

template <>
void launch_pack_words<TWELL_T>(const Ffn& f, cudaStream_t stream) {
  launch(pack_words<TWELL_T>, dim3(f.rows, f.tiles), 32, 0, stream, f);
}

}  // namespace twell::hopper
