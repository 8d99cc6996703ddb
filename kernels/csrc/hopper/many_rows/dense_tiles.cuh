// Which tiles of two blocks of rows and 256 neurons lie dense in `spill`. The gate's packing warps count their rows; once all are there,
// a list of their window names the tile, and the gate's clusters go on with the up products of those on the lists of windows of high nnz: what
// fires so much stays in place, and its blocks run dense.
//
// What lies dense depends on the inputs alone; who takes what, and whether anybody does before `up`, on time. Bits do not: it is the same
// product with the same epilogue.
#pragma once

#include <algorithm>

#include "common/sm90.cuh"
#include "hopper/params.h"

namespace twell::hopper {

using namespace twell::sm90;

constexpr int kPairRows = 2 * kBlockRows;
// In 128ths of the neurons, in the mean of rows: what a window's rows fire that stays in place though they are somewhat uneven; what a
// tile's do that leaves whole though not all of it fires: less, as tiles differ; and what a tile counts for in its window of which nearly
// all fires, however seldom, as rows in another order gain nothing there: more, so that one in fifteen may fire less.
constexpr int kHighNnzWindow = 14, kHighNnzTile = 11, kNearlyAll = 15;

// Whether `fired` of so many rows' `neurons` is that much.
__host__ __device__ constexpr bool is_high_nnz(int share, uint64_t fired, uint64_t rows, int neurons) {
  return 128 * fired >= share * rows * neurons;
}

// A tile is given as pair of blocks * tiles + tile.
class DensePairs {
 public:
  static __host__ __device__ __forceinline__ int windows(const Ffn& f) { return (f.blocks * kBlockRows + kWindow - 1) / kWindow; }
  static __host__ __device__ __forceinline__ int count(const Ffn& f) { return (f.blocks + 1) / 2 * f.tiles; }
  static __host__ __device__ __forceinline__ int words(const Ffn& f) { return 3 * windows(f) + 2 * count(f); }  // of f.dense_tiles

  __device__ __forceinline__ explicit DensePairs(const Ffn& f)
      : fired_(f.dense_tiles), listed_(fired_ + windows(f)), taken_(listed_ + windows(f)), rows_(taken_ + windows(f)), list_(rows_ + count(f)) {}

  // So many more values of the window that has row m0.
  __device__ __forceinline__ void fire(int m0, int values) const { atomicAdd(fired_ + m0 / kWindow, values); }
  __device__ __forceinline__ int fired(int window) const { return fired_[window]; }
  // So many more rows, which this thread has seen written, and quiet ones among them. Of many such the window will hardly stay in place.
  __device__ __forceinline__ void add(const Ffn& f, int tile, int rows, int quiet) const {
    const int all = min(kPairRows, f.rows - tile / f.tiles * kPairRows), window = tile / in_window(f), more = quiet << kQuietShift | rows;
    const int now = add_in_order(rows_ + tile, more) + more;
    if (now % (1 << kQuietShift) != all || 8 * (now >> kQuietShift) > all) return;
    release_store(list_ + window * in_window(f) + atomicAdd(listed_ + window, 1), tile + 1);
  }
  // The next of those on the lists of windows of high nnz, or -1; nobody else takes it. By a warp. Reads by the copy engine need a fence.
  __device__ __forceinline__ int take(const Ffn& f, int lane) const {
    static_assert(kDenseTileBlocks * kBlockRows / kWindow <= 32);  // a lane each
    const int mine = min(lane, windows(f) - 1), left = __ldcg(listed_ + mine) - __ldcg(taken_ + mine), fired = __ldcg(fired_ + mine);
    const bool some = lane == mine && left > 0 && is_high_nnz(kHighNnzWindow, fired, min(kWindow, f.rows - mine * kWindow), f.d_ff);
    for (uint32_t lists = __ballot_sync(~0u, some); lists; lists &= lists - 1) {
      const int window = __ffs(lists) - 1;
      int tile = -1;
      if (lane == 0) {
        const int at = atomicAdd(taken_ + window, 1), place = window * in_window(f) + at;
        if (at < in_window(f) && place < count(f)) tile = acquire_load(list_ + place) - 1;
        if (tile >= 0) rows_[tile] = kTaken;  // if it comes to lie there a moment later, it is left to `up`
      }
      if ((tile = __shfl_sync(~0u, tile, 0)) >= 0) return tile;
    }
    return -1;
  }
  // After the gate: whether its up product is there as well.
  __device__ __forceinline__ bool taken(int tile) const { return rows_[tile] == kTaken; }

 private:
  static constexpr int kTaken = -1, kQuietShift = 16;
  static __device__ __forceinline__ int in_window(const Ffn& f) { return kWindow / kPairRows * f.tiles; }  // tiles
  int *fired_, *listed_, *taken_, *rows_, *list_;  // of each window; of each tile; the lists, a window's after the other's
};

}  // namespace twell::hopper
