// How the CTAs of a product divide its work evenly, though some tiles are a hundred times longer than others.
//
// All tiles are laid in one row: every item (a block of rows, a group of neurons) for the first columns of outputs,
// then every item for the next ones. The length of a tile is its steps and kTileSteps more, or kEmptyTile without any
// steps. Each CTA takes an equal length of that row; a tile that crosses a border is cut there, unless little of it is
// on one side. Phases follow each other, each divided in this way: all CTAs then read the same matrix at a time, of
// which the L2 holds more.
//
// Example: two CTAs, one column, items of 100, 20 and 10 steps: 112 + 32 + 22 = 166 in all. The border is at 83: the
// first CTA takes steps 0 to 83 of the first tile, the second one the rest of it and the two others.
//
// The last CTA to finish a piece of a cut tile adds all pieces, in their order: the same input gives the same bits, and
// no CTA waits.
#pragma once

#include "common/bits.cuh"
#include "hopper/backward/params.h"

namespace twell::hopper {

constexpr int kTileSteps = 12;  // what a tile takes besides its steps, in steps
constexpr int kEmptyTile = 3;   // what a tile without steps takes: zeros are written
constexpr int kLeastCut = 4;    // fewest steps on either side of a border

struct Border {
  int tile, step;  // step 0: between the tile and the one before
};

struct EvenSharesMemory {
  int before[kMostItems + 1];     // length of the items before each, in one column of outputs
  Border borders[kMostCtas + 1];  // where each CTA's share of a phase begins
};

// Some steps of a tile, whose pieces are those of CTAs `owner` to `final`.
struct SharedPiece {
  int item, column, first, end, owner, final;
  int phase;
  bool whole;
};

// All phases have the same number of columns; each phase's follow those of the phases before.
class EvenShares {
 public:
  // By all threads. steps_of(item): of each of its tiles.
  template <typename Steps>
  __device__ __forceinline__ EvenShares(EvenSharesMemory& memory, int items, int columns, int phases, Steps steps_of)
      : m_(memory), items_(items), columns_(columns), phases_(phases) {
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      int sum = 0;
#pragma unroll 1
      for (int item0 = 0; item0 < items; item0 += 32) {
        const int mine = item0 + lane < items ? length_of(steps_of(item0 + lane)) : 0;
        const int upto = sum_upto(mine, lane);
        if (item0 + lane < items) m_.before[item0 + lane] = sum + upto - mine;
        sum += __shfl_sync(~0u, upto, 31);
      }
      if (lane == 0) m_.before[items] = sum;
    }
    __syncthreads();
    for (int cta = threadIdx.x; cta <= static_cast<int>(gridDim.x); cta += blockDim.x) m_.borders[cta] = border(cta);
    __syncthreads();
  }

  __device__ __forceinline__ int count() const { return phases_ * in_phase(); }
  // The i-th piece of this CTA.
  __device__ __forceinline__ SharedPiece piece(int i) const {
    SharedPiece p;
    p.phase = i / in_phase();
    const int tile = from().tile + i % in_phase(), cta = blockIdx.x;
    p.item = tile % items_, p.column = tile / items_ + p.phase * columns_;
    const int steps = max(length(p.item) - kTileSteps, 0);
    p.first = tile == from().tile ? from().step : 0;
    p.end = tile == to().tile ? to().step : steps;
    p.owner = p.final = cta;
    while (m_.borders[p.owner].tile == tile && m_.borders[p.owner].step > 0) --p.owner;
    while (m_.borders[p.final + 1].tile == tile && m_.borders[p.final + 1].step > 0) ++p.final;
    p.whole = p.owner == p.final;
    return p;
  }
  // The slot for a CTA's piece of a cut tile: of the tile in which its share ends, or of the one in which it begins.
  static __device__ __forceinline__ int slot(int cta, const SharedPiece& p) {
    return (p.phase * kMostCtas + cta) * 2 + (cta == p.owner);
  }

 private:
  static_assert(kEmptyTile <= kTileSteps);
  static __device__ __forceinline__ int length_of(int steps) { return steps > 0 ? steps + kTileSteps : kEmptyTile; }
  __device__ __forceinline__ int in_phase() const { return to().tile - from().tile + (to().step > 0); }
  __device__ __forceinline__ const Border& from() const { return m_.borders[blockIdx.x]; }
  __device__ __forceinline__ const Border& to() const { return m_.borders[blockIdx.x + 1]; }
  __device__ __forceinline__ int length(int item) const { return m_.before[item + 1] - m_.before[item]; }
  __device__ __forceinline__ Border border(int cta) const {
    const int column = m_.before[items_], ctas = gridDim.x;
    if (cta == ctas) return {items_ * columns_, 0};
    const int at = static_cast<int>(static_cast<int64_t>(column) * columns_ * cta / ctas), which = at / column,
              rest = at % column;
    int low = 0, high = items_;  // the last item that begins at `rest` or before it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (m_.before[middle] <= rest ? low : high) = middle;
    }
    const int into = rest - m_.before[low], steps = max(length(low) - kTileSteps, 0), tile = which * items_ + low;
    // No border may lie before an earlier one, as of several in a tile: the CTA between the two would leave a piece
    // undone that others wait for. So those past the last cut, but not past the middle, are that cut, not the tile's
    // beginning.
    const int last_cut = steps - kLeastCut;
    if (last_cut >= kLeastCut && into >= kLeastCut && (into <= last_cut || 2 * into <= length(low)))
      return {tile, min(into, last_cut)};
    return {tile + (2 * into > length(low)), 0};
  }

  EvenSharesMemory& m_;
  int items_, columns_, phases_;
};

}  // namespace twell::hopper
