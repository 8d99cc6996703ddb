#include <utility>

#include "hopper/mid_rows/down.cuh"
#include "hopper/mid_rows/gate_up.cuh"
#include "hopper/mid_rows/persistent_down.cuh"
#include "hopper/mid_rows/persistent_gate.cuh"
#include "hopper/tma_launch.cuh"

namespace twell::hopper {

namespace {

// The halves of a matrix's lines, of 32 outputs each, in boxes of 64 neurons: the box is at (0, neuron, half), with
// zeros in place of the other half.
template <typename T>
CUtensorMap halves_map(const void* matrix, int height, int width) {
  const cuuint64_t sizes[] = {32, static_cast<cuuint64_t>(height), static_cast<cuuint64_t>(width) / 32};
  const cuuint64_t strides[] = {width * sizeof(T), 32 * sizeof(T)};
  const cuuint32_t box[] = {64, kTileK, 1};
  return encode_map(kMapType<T>, matrix, 3, sizes, strides, box, true);
}

// Calls run<the i-th of `all`>() for the one that equals `chosen`.
template <const auto& all, typename Shape, typename Run>
void by_shape(const Shape& chosen, Run run) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    (void)((all[i] == chosen && (run.template operator()<all[i]>(), true)) || ...);
  }(std::make_index_sequence<std::size(all)>());
}

// How many clusters of one, two and three CTAs of `tiled_down` run at once on this device. A cluster stays within a
// group of multiprocessors; group sizes differ from one device to another, and clusters leave some multiprocessors
// idle: 39 clusters of three run on 132 multiprocessors.
const std::array<int, 4>& down_clusters() {
  return of_this_device([]() -> std::array<int, 4> {
    // the most that it uses, which leaves no room for another CTA on a multiprocessor
    const int ones = multiprocessors(), shared = 226 * 1024;
    return {0, ones, ones / 2, std::max(clusters_at_once(tiled_down<TWELL_T, 64, 3>, kThreads, shared, 3), 1)};
  });
}

void launch_persistent_gate(const Ffn& f, cudaStream_t stream) {
  const auto x = tensor_map<TWELL_T>(f.x, f.rows, f.d_model, kTileM),
             w = tensor_map<TWELL_T>(f.w_gate, f.d_ff, f.d_model, kTileN / 2);
  const int tiles = choose_cta_tile(f, multiprocessors()).columns(f),
            clusters = std::min(multiprocessors() / 2, (f.blocks + 1) / 2 * tiles);
  launch_overlapping(persistent_gate<TWELL_T>, 2 * clusters, kThreads, kSharedBytes, 2, stream, x, w,
                     hidden_map<TWELL_T>(f, kTileN), f, tiles);
}

// Throws as `launch_tiled_down` does if d_ff leaves no room for a ring beside the list of a union.
void launch_persistent_down(const Ffn& f, int* nnz, cudaStream_t stream) {
  by_shape<kPersistentOutputs>(choose_persistent_outputs(f, multiprocessors()), [&]<int kOut>() {
    using Down = PersistentDown<kOut>;
    const int stages = Down::stages(f.d_ff), tiles = choose_cta_tile(f, multiprocessors()).columns(f);
    if (stages < Down::kLeastStages)
      throw std::runtime_error("down: d_ff of " + std::to_string(f.d_ff) + " leaves no room for stages");
    const auto w = tensor_map<TWELL_T>(f.w_down, f.d_ff, f.d_model, kTileK);
    const auto h = tensor_map<TWELL_T>(f.hidden, f.blocks * f.panels * kPanelColumns, kBlockRows, kTileK);
    const int tasks = (f.d_model + kOut - 1) / kOut * f.blocks;
    launch_overlapping(persistent_down<TWELL_T, kOut>, std::min(multiprocessors(), tasks), kThreads,
                       stages * Down::kStageBytes + Down::kStagingBytes + Down::list_bytes(f.d_ff), 1, stream, w, h, f,
                       nnz, tiles, stages);
  });
}

}  // namespace

template <>
void launch_tiled_gate_up<TWELL_T>(const Ffn& f, bool dense, cudaStream_t stream) {
  if (persists(f) && !dense) return launch_persistent_gate(f, stream);
  const CtaTile tile = choose_cta_tile(f, multiprocessors());
  by_shape<kCtaTiles>(tile, [&]<CtaTile kTile>() {
    constexpr int kN = kTile.neurons, kRows = kTile.rows;
    using Where = TiledRing<kN, kRows>;
    const auto rows = [&](int box) { return tensor_map<TWELL_T>(f.x, f.rows, f.d_model, box); };
    // half: a CTA's share of a tile's rows
    const int taken = tile.taken(f), half = taken / kTiledPair, rest = f.rows % taken % half;
    const auto x = rows(half), last_x = rows(rest > 0 ? rest : half);
    const auto weights = [&](const void* matrix, int neurons) {
      return tensor_map<TWELL_T>(matrix, f.d_ff, f.d_model, neurons);
    };
    const int last = f.d_ff % kN > 0 ? f.d_ff % kN : kN;  // neurons of the last tile
    const auto gate = weights(f.w_gate, kN), last_gate = weights(f.w_gate, last);
    const auto up = f.w_up == nullptr ? gate : weights(f.w_up, kN),
               last_up = f.w_up == nullptr ? gate : weights(f.w_up, last);
    const auto h = hidden_map<TWELL_T>(f, kN);
    const dim3 grid(kTiledPair, (f.rows + kRows - 1) / kRows, tile.columns(f) / kTiledPair);
    launch_overlapping(tiled_gate_up<TWELL_T, kN, kRows>, grid, kThreads, Where::kBegin + Where::kBytes, kTiledPair,
                       stream, x, last_x, gate, up, last_gate, last_up, h, f, taken, dense);
  });
}

template <>
void launch_tiled_down<TWELL_T>(const Ffn& f, int* nnz, cudaStream_t stream) {
  if (persists(f)) return launch_persistent_down(f, nnz, stream);
  const CtaTile tile = choose_cta_tile(f, multiprocessors());
  const int tiles = tile.columns(f), block_rows = std::min(tile.taken(f), kBlockRows);
  by_shape<kDownShapes>(choose_down_shape(f, down_clusters()), [&]<DownShape kOutputs>() {
    constexpr int kOut = kOutputs.each, kSplits = kOutputs.splits;
    using Down = TiledDown<kOut, kSplits>;
    const int stages = Down::stages(f.d_ff);
    if (stages < Down::kLeastStages)
      throw std::runtime_error("down: d_ff of " + std::to_string(f.d_ff) + " leaves no room for stages");
    const auto w = tensor_map<TWELL_T>(f.w_down, f.d_ff, f.d_model, kTileK);
    const auto half = kOut % 64 == 0 ? w : halves_map<TWELL_T>(f.w_down, f.d_ff, f.d_model);
    const auto h = tensor_map<TWELL_T>(f.hidden, f.blocks * f.panels * kPanelColumns, kBlockRows, kTileK);
    launch_overlapping(tiled_down<TWELL_T, kOut, kSplits>, dim3(kSplits, (f.d_model + kOut - 1) / kOut, f.blocks),
                       kThreads, stages * Down::kStageBytes + Down::list_bytes(f.d_ff), kSplits, stream, w, half, h, f,
                       block_rows, nnz, tiles, stages);
  });
}

}  // namespace twell::hopper
