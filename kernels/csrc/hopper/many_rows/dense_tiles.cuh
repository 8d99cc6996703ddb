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
// differ. One that fires less than the lowest may leave both dense and as words. A tile of which nearly all fires counts
// for more in its window, since another order of rows gains nothing there, so one in fifteen may fire less.
constexpr int kHighNnzWindow = 14, kHighNnzTile = 11, kLowNnzTile = 4, kNearlyAll = 15;

// Whether `fired` firings of this many rows and neurons exceed a threshold.
__host__ __device__ constexpr bool is_high_nnz(int share, uint64_t fired, uint64_t rows, int neurons) {
  return 128 * fired >= share * rows * neurons;
}

// Whether a tile whose rows fire `fired` times, and `united` of its neurons, leaves both dense and as words: most of its
// neurons fire, each seldom. Which of the two serves hangs on the window, as tiles of even inputs differ more in what
// they fire than windows that gain from unions do from those that do not.
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
  static __host__ __device__ __forceinline__ int windows(const Ffn& f) { return (f.blocks * kBlockRows + kWindow - 1) / kWindow; }
  static __host__ __device__ __forceinline__ int count(const Ffn& f) { return (f.blocks + 1) / 2 * f.tiles; }
  // of f.dense_tiles
  static __host__ __device__ __forceinline__ int words(const Ffn& f) { return 3 * windows(f) + 2 * count(f); }

  __device__ __forceinline__ explicit DensePairs(const Ffn& f)
      : fired_(f.dense_tiles), listed_(fired_ + windows(f)), taken_(listed_ + windows(f)), rows_(taken_ + windows(f)), list_(rows_ + count(f)) {}

  // Adds this many values to the window that has row m0.
  __device__ __forceinline__ void fire(int m0, int values) const { atomicAdd(fired_ + m0 / kWindow, values); }
  __device__ __forceinline__ int fired(int window) const { return fired_[window]; }
  // Adds this many rows, which this thread has seen written, and the quiet ones among them. With many quiet rows the
  // window will hardly stay in place.
  __device__ __forceinline__ void add(const Ffn& f, int tile, int rows, int quiet) const {
    const int all = min(kPairRows, f.rows - tile / f.tiles * kPairRows), window = tile / in_window(f), more = quiet << kQuietShift | rows;
    const int now = add_in_order(rows_ + tile, more) + more;
    if (now % (1 << kQuietShift) != all || 8 * (now >> kQuietShift) > all) return;
    release_store(list_ + window * in_window(f) + atomicAdd(listed_ + window, 1), tile + 1);
  }
  // Returns the next tile on the lists of windows of high nnz, which no other caller gets, or -1. By a warp. The copy
  // engine's reads of it need a fence.
  __device__ __forceinline__ int take(const Ffn& f, int lane) const {
    static_assert(kDenseTileBlocks * kBlockRows / kWindow <= 32);  // a lane for each window
    const int mine = min(lane, windows(f) - 1), left = __ldcg(listed_ + mine) - __ldcg(taken_ + mine), fired = __ldcg(fired_ + mine);
    const bool some = lane == mine && left > 0 && is_high_nnz(kHighNnzWindow, fired, min(kWindow, f.rows - mine * kWindow), f.d_ff);
    for (uint32_t lists = __ballot_sync(~0u, some); lists; lists &= lists - 1) {
      const int window = __ffs(lists) - 1;
      int tile = -1;
      if (lane == 0) {
        const int at = atomicAdd(taken_ + window, 1), place = window * in_window(f) + at;
        if (at < in_window(f) && place < count(f)) tile = acquire_load(list_ + place) - 1;
        if (tile >= 0) rows_[tile] = kTaken;  // a tile that becomes dense a moment later is left to `up`
      }
      if ((tile = __shfl_sync(~0u, tile, 0)) >= 0) return tile;
    }
    return -1;
  }
  // After the gate: whether the window is of high nnz and three of four of its tiles or more are listed. In order of nnz,
  // all up products that clusters have made would be made again. With fewer dense tiles, other blocks gain more by it.
  __device__ __forceinline__ bool mostly_dense(const Ffn& f, int window, int rows) const {
    return is_high_nnz(kHighNnzWindow, fired_[window], rows, f.d_ff) &&
           4 * listed_[window] >= 3 * ((rows + kPairRows - 1) / kPairRows * f.tiles);
  }
  // After the gate: whether a tile is dense though it may be left as words too: all its rows are, in such a window.
  __device__ __forceinline__ bool is_dense(const Ffn& f, int tile) const {
    const int m0 = tile / f.tiles * kPairRows, window = m0 / kWindow;
    return (taken(tile) || rows_[tile] % (1 << kQuietShift) == min(kPairRows, f.rows - m0)) &&
           mostly_dense(f, window, min(kWindow, f.rows - window * kWindow));
  }
  // After the gate: whether the tile's up product is done as well.
  __device__ __forceinline__ bool taken(int tile) const { return rows_[tile] == kTaken; }

 private:
  static constexpr int kTaken = -1, kQuietShift = 16;
  static __device__ __forceinline__ int in_window(const Ffn& f) { return kWindow / kPairRows * f.tiles; }  // tiles
  // of each window; of each tile; the lists, one window's after the other
  int *fired_, *listed_, *taken_, *rows_, *list_;
};

}  // namespace twell::hopper
