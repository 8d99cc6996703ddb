// Which tiles of two blocks of rows and 256 neurons lie whole in `spill`. The gate's packing warps count their rows; once all are there,
// a list names the tile, and the gate's clusters go on with the up products of those on the list.
//
// What lies whole depends on the inputs alone; who takes what, and whether anybody does before `up`, on time. Bits do not: it is the same
// product with the same epilogue.
#pragma once

#include <algorithm>

#include "common/sm90.cuh"
#include "hopper/ffn.h"

namespace twell::hopper {

using namespace twell::sm90;

constexpr int kPairRows = 2 * kBlockRows;
// Who takes part: tiles whose rows fire that much in the mean, in 64ths of their neurons, and one 64th each. A window whose rows fire
// somewhat less in the mean stays in place, so that next to nothing is made in vain.
constexpr int kLoudTile = 8, kLoudWindow = 6;

// A tile is given as pair of blocks * tiles + tile.
class WholePairs {
 public:
  static __host__ __device__ __forceinline__ int count(const Ffn& f) { return (f.blocks + 1) / 2 * f.tiles; }
  static __host__ __device__ __forceinline__ int words(const Ffn& f) { return 2 + 2 * count(f); }  // of f.whole

  __device__ __forceinline__ explicit WholePairs(const Ffn& f)
      : listed_(f.whole), taken_(f.whole + 1), rows_(f.whole + 2), list_(rows_ + count(f)) {}

  // So many more rows, which this thread has seen written.
  __device__ __forceinline__ void add(const Ffn& f, int tile, int rows) const {
    const int all = min(kPairRows, f.rows - tile / f.tiles * kPairRows);
    if (add_in_order(rows_ + tile, rows) + rows == all) release_store(list_ + atomicAdd(listed_, 1), tile + 1);
  }
  // The next on the list, or -1; nobody else takes it. Reads by the copy engine need a fence.
  __device__ __forceinline__ int take(const Ffn& f) const {
    if (acquire_load(list_) == 0) return -1;
    const int at = atomicAdd(taken_, 1), tile = at < count(f) ? acquire_load(list_ + at) - 1 : -1;
    if (tile >= 0) rows_[tile] = kTaken;  // if it comes to lie there a moment later, it is left to `up`
    return tile;
  }
  // After the gate: whether its up product is there as well.
  __device__ __forceinline__ bool taken(int tile) const { return rows_[tile] == kTaken; }

 private:
  static constexpr int kTaken = -1;
  int *listed_, *taken_, *rows_, *list_;
};

}  // namespace twell::hopper
