// Which tiles of two blocks of rows and 256 neurons are dense in `spill`. The gate's packing warps count their rows;
// once all have been counted, the tile is added to a list of its window, and the gate's clusters continue with the up
// products of tiles on the lists of windows of high nnz: rows that fire so much stay in place, and their blocks run
// dense. Tiles that are left as words too are among them, and are words again in other windows.
//
// Which tiles are dense depends on the inputs alone. Which CTA takes a tile, and whether any does before `up`, depends
// on time. Bits do not: it is the same product with the same epilogue.
#pragma once

#include <algorithm>

#include "common/sm90.cuh"
#include "hopper/params.h"

namespace twell::hopper {

using namespace twell::sm90;

constexpr int kPairRows = 2 * kBlockRows;
// Thresholds, in 128ths of the neurons, for the mean over rows. A window whose rows fire more stays in place though its
// rows are somewhat uneven. A tile that fires more leaves dense though not all of it fires; this one is lower, as tiles
// differ. One that fires less than the lowest may leave both dense and as words. A tile of which nearly all fires
// counts for more in its window, since another order of rows gains nothing there, so one in fifteen may fire less.
constexpr int kHighNnzWindow = 14, kHighNnzTile = 11, kLowNnzTile = 4, kNearlyAll = 15;

// Whether `fired` firings of this many rows and neurons exceed a threshold.
__host__ __device__ constexpr bool is_high_nnz(int share, uint64_t fired, uint64_t rows, int neurons) {
  return 128 * fired >= share * rows * neurons;
}

// Whether a tile whose rows fire `fired` times, and `united` of its neurons, leaves both dense and as words: most of
// its neurons fire, each seldom. Which of the two serves hangs on the window, as tiles of even inputs differ more in
// what they fire than windows that gain from unions do from those that do not.
__device__ __forceinline__ bool leaves_both(int united, uint64_t fired, int rows, int neurons) {
  return 50 * united >= 33 * neurons && !is_high_nnz(kLowNnzTile, fired, rows, neurons);
}

// For how many firings such a tile counts in its window: the threshold where 0.72 of its neurons fire, from where on
// unions gain nothing, and from 0.73 on as many as one of which nearly all fires.
__device__ __forceinline__ int counted_as(int united, int rows, int neurons) {
  return (rows * min(100 * united - 58 * neurons, kNearlyAll * neurons) + 127) / 128;
}

// A tile is given as pair of blocks * tiles + tile.
class DensePairs {
 public:
  static __host__ __device__ __forceinline__ int windows(const Ffn& f) {
    return (f.blocks * kBlockRows + kWindow - 1) / kWindow;
  }
  static __host__ __device__ __forceinline__ int count(const Ffn& f) { return (f.blocks + 1) / 2 * f.tiles; }
  // of f.dense_tiles
  static __host__ __device__ __forceinline__ int words(const Ffn& f) { return 3 * windows(f) + 2 * count(f); }

  __device__ __forceinline__ explicit DensePairs(const Ffn& f)
      : fired_(f.dense_tiles),
        listed_(fired_ + windows(f)),
        taken_(listed_ + windows(f)),
        rows_(taken_ + windows(f)),
        list_(rows_ + count(f)) {}

  // Adds this many values to the window that has row m0.
  __device__ __forceinline__ void fire(int m0, int values) const { atomicAdd(fired_ + m0 / kWindow, values); }
  __device__ __forceinline__ int fired(int window) const { return __ldcg(fired_ + window); }
  // Adds this many rows, which this thread has seen written, and the quiet ones among them. With many quiet rows the
  // window will hardly stay in place.
  __device__ __forceinline__ void add(const Ffn& f, int tile, int rows, int quiet) const {
    const int all = min(kPairRows, f.rows - tile / f.tiles * kPairRows), window = tile / in_window(f),
              more = quiet << kQuietShift | rows;
    const int now = add_in_order(rows_ + tile, more) + more;
    if (rows_of(now) != all || 8 * (now >> kQuietShift) > all) return;
    release_store(list_ + window * in_window(f) + atomicAdd(listed_ + window, 1), tile + 1);
  }
  // Returns the next tile on the lists of windows of high nnz, which no other caller gets, or -1. By a warp. The copy
  // engine's reads of it need a fence.
  __device__ __forceinline__ int take(const Ffn& f, int lane) const {
    static_assert(kDenseTileBlocks * kBlockRows / kWindow <= 32);  // a lane for each window
    const int mine = min(lane, windows(f) - 1), left = __ldcg(listed_ + mine) - __ldcg(taken_ + mine),
              fired = __ldcg(fired_ + mine);
    const bool some =
        lane == mine && left > 0 && is_high_nnz(kHighNnzWindow, fired, min(kWindow, f.rows - mine * kWindow), f.d_ff);
    for (uint32_t lists = __ballot_sync(~0u, some); lists; lists &= lists - 1) {
      const int window = __ffs(lists) - 1;
      int tile = -1;
      if (lane == 0) {
        const int at = atomicAdd(taken_ + window, 1), place = window * in_window(f) + at;
        if (at < in_window(f) && place < count(f)) tile = acquire_load(list_ + place) - 1;
        // what the plan has left to `up` stays so, as does a tile that becomes dense later
        if (tile >= 0 && atomicOr(rows_ + tile, kTaken) & kTaken) tile = -1;
      }
      if ((tile = __shfl_sync(~0u, tile, 0)) >= 0) return tile;
    }
    return -1;
  }
  // Leaves the tile's up product to `up`, unless the gate's kernel has taken it; returns whether it has.
  __device__ __forceinline__ bool leave(int tile) const {
    int word = __ldcg(rows_ + tile), before;
    for (; !(word & kTaken) && (before = atomicCAS(rows_ + tile, word, word | kTaken | kLeft)) != word; word = before) {
    }
    return is_by_gate(word);
  }
  // Whether the window is of high nnz and three of four of its tiles or more are listed. In order of nnz, all up
  // products that clusters have made would be made again. With fewer dense tiles, other blocks gain more by it. Once it
  // is so it stays so; after the gate it is final.
  __device__ __forceinline__ bool mostly_dense(const Ffn& f, int window, int rows) const {
    return is_high_nnz(kHighNnzWindow, fired(window), rows, f.d_ff) &&
           4 * __ldcg(listed_ + window) >= 3 * ((rows + kPairRows - 1) / kPairRows * f.tiles);
  }
  // Whether all rows of the tile are written dense, be it as words too.
  __device__ __forceinline__ bool is_written(const Ffn& f, int tile) const {
    return rows_of(__ldcg(rows_ + tile)) == min(kPairRows, f.rows - tile / f.tiles * kPairRows);
  }
  // After the gate: whether the tile's up product is done as well.
  __device__ __forceinline__ bool taken(int tile) const { return is_by_gate(__ldcg(rows_ + tile)); }

 private:
  // Of a tile: its rows that are written dense, the quiet ones of them, and flags: nobody else can take its up product,
  // as the gate's kernel has, or as the plan has left it to `up`.
  static constexpr int kQuietShift = 16, kTaken = 1 << 30, kLeft = 1 << 29;
  static __device__ __forceinline__ int rows_of(int word) { return word % (1 << kQuietShift); }
  static __device__ __forceinline__ bool is_by_gate(int word) { return word & kTaken && !(word & kLeft); }
  static __device__ __forceinline__ int in_window(const Ffn& f) { return kWindow / kPairRows * f.tiles; }  // tiles
  // of each window; of each tile; the lists, one window's after the other
  int *fired_, *listed_, *taken_, *rows_, *list_;
};

// Whether most tiles of a block's window are dense. m0: the block's first row
__device__ __forceinline__ bool is_mostly_dense(const Ffn& f, int m0) {
  const int window = m0 / kWindow;
  return DensePairs(f).mostly_dense(f, window, min(kWindow, f.rows - window * kWindow));
}

}  // namespace twell::hopper
