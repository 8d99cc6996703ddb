// More than 64 rows without a plan: too many to have every row in each CTA, too few to fill the multiprocessors with
// tiles of 128 x 256 and to gain from an order. And fewer rows, if there are many neurons. Two launches that overlap.
//
// In `tiled_gate_up` a CTA has 128 or 256 rows and 48 to 256 neurons, and computes the up product of those of its
// neurons that any of its rows fires at once. `tiled_down` goes over the union of a block of 128 rows, tile after tile
// of what fired; if outputs are few, the CTAs of a cluster divide the union and add their sums in one order. Loops that
// index no registers are kept from being unrolled: otherwise the compiler makes 150 KB of code of `tiled_gate_up`,
// which does not stay in the instruction cache (128 KB) beside `tiled_down`, and code that is not in the cache takes
// longer to load than to run. The copy engine brings a multiprocessor up to 68 bytes a cycle, but no more than 20 to 45
// for the requests of a single thread: warps take turns.
//
// The launches hand on: in `hidden`, for each block, [panels * 64 neurons][128 rows], with the neurons of the block's
// union alone. In `unions`, for each block, `TiledMarks`, and its counts in `masks`, as `pack_words` may write `tails`
// first.
#pragma once

#include <algorithm>

#include "hopper/ring.cuh"

namespace twell::hopper {

constexpr int kTiledStages = 12;
constexpr int kTiledPair = 2;  // CTAs that have neighbouring neurons and the same rows

// How many rows and neurons a CTA has in the gate and up products.
struct CtaTile {
  int rows, neurons;
  bool operator==(const CtaTile&) const = default;
  // The rows of a tile that are computed: if a tile is one block, the same number in all of them, in steps of 16, as
  // all wait for the fullest.
  int taken(const Ffn& f) const {
    return rows > kBlockRows ? rows : (f.rows + 16 * f.blocks - 1) / (16 * f.blocks) * 16;
  }
  int columns(const Ffn& f) const { return (f.d_ff + neurons * kTiledPair - 1) / (neurons * kTiledPair) * kTiledPair; }
};

constexpr CtaTile kCtaTiles[] = {{128, 48},  {128, 64},  {128, 96},  {128, 112}, {128, 128}, {128, 144},
                                 {128, 160}, {128, 176}, {128, 192}, {128, 224}, {128, 256}, {256, 176}};

// Cycles of a step of 64 of k: the time to fetch its rows at this many bytes a cycle, or of the product of 128 rows and
// `width` columns at four columns a cycle, whichever is longer.
inline int step_cycles(int incoming, int rate, int width) { return std::max(incoming * kTileK * 2 / rate, 4 * width); }

// Whether a plain FFN has so many tiles that the CTAs of `persistent_gate` take several each. With up to kUnevenBlocks
// blocks all have one size, which may be less than 128 rows; with more, all but the last have 128.
inline bool persists(const Ffn& f) {
  constexpr int kFewTiles = 352, kUnevenBlocks = 8;
  return f.w_up == nullptr && f.blocks > kUnevenBlocks && static_cast<int64_t>(f.blocks) * f.tiles > kFewTiles;
}

// The tile with the fewest cycles in waves of CTAs: 16 more for each step, and 1200 for the code around them.
inline CtaTile choose_cta_tile(const Ffn& f, int processors) {
  if (persists(f)) return {kBlockRows, kTile};
  CtaTile best{};
  int64_t least = INT64_MAX;
  const int steps = (f.d_model + kTileK - 1) / kTileK;
  for (const CtaTile& tile : kCtaTiles) {
    const int ctas = tile.columns(f) * ((f.rows + tile.rows - 1) / tile.rows);
    const int step = step_cycles(tile.taken(f) + tile.neurons, 68, tile.neurons * tile.rows / kBlockRows);
    const int64_t cost = (ctas + processors - 1) / processors * (steps * (step + 16) + 1200ll);
    if (cost < least) best = tile, least = cost;
  }
  return best;
}

// Which of how many tiles of neurons a CTA has. They are the grid's outermost dimension, so that CTAs that run at once
// read the same weights: weights come from memory once, even if they are larger than the L2.
__device__ __forceinline__ int tile_column() { return blockIdx.z * kTiledPair + blockIdx.x; }
__device__ __forceinline__ int tile_columns() { return gridDim.z * kTiledPair; }

// What a block's tiles mark of it.
struct TiledMarks {
  uint16_t* fired;   // [panels * 4], a bit a neuron of the union: what fires, or all of a tile that `takes_all`
  uint32_t* broken;  // [tiles][4], a bit a row that is not finite
  uint16_t* counts;  // [tiles][rows]: how many fired
  int rows;          // 128, or as many as exist: there is no more room then
  __device__ __forceinline__ TiledMarks(const Ffn& f, int block, int tiles) {
    fired = f.unions + static_cast<int64_t>(block) * f.panels * kPanelColumns;
    broken = reinterpret_cast<uint32_t*>(fired + f.panels * 4);
    rows = min(f.rows, kBlockRows);
    counts = reinterpret_cast<uint16_t*>(f.masks) + static_cast<int64_t>(block) * tiles * rows;
  }
  __device__ __forceinline__ uint16_t* counts_of(int tile) const { return counts + tile * rows; }
};

// Address of a neuron's hidden state for a block's rows.
template <typename T>
__device__ __forceinline__ T* hidden_of(const Ffn& f, int block, int neuron) {
  return static_cast<T*>(f.hidden) + (static_cast<int64_t>(block) * f.panels * kPanelColumns + neuron) * kBlockRows;
}

}  // namespace twell::hopper
