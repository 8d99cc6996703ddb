// Up to 16 rows, and up to two waves of CTAs: bound by reading each weight once, and by what waits for what. Two launches that overlap, and
// no plan.
//
// `thin_gate_up` gives a CTA 48 neurons and all rows; for those that any row fires it takes the up product at once. `thin_down`
// goes over what fired, a cluster of four to 64 outputs. In both, warps share out the sum, each with a ring of its own that the copy
// engine fills and that no other warp waits for, and add up at the end, in one order.
// Weights are the rows of the products and the rows their columns, eight to a tile. The two launches leave room for each other on
// a multiprocessor, so that each stands ready when the one before it ends.
#pragma once

#include "common/sm80.cuh"
#include "hopper/gemm.cuh"

namespace twell::hopper {

constexpr int kThinNeurons = kFewNeurons, kThinQuads = kThinNeurons / 4;
constexpr int kThinGathered = 32;  // neurons that are fetched one by one; of more, all 48 are
constexpr int kThinBoxBytes = kThinNeurons * 128;  // 48 neurons of 64 k, or of 64 outputs
constexpr int kThinWarps = 8, kThinThreads = 32 * kThinWarps;  // that multiply

// What the gate and up products of 48 neurons leave, beside the hidden state.
struct ThinGroup {
  uint16_t list[kThinNeurons];  // the neurons that any row fires, ascending; zeros behind them
  uint32_t count;  // of them; 48: the hidden state is that of all neurons of the group
  uint32_t broken;  // a bit a row that is not finite
  uint8_t counts[kThinRows];  // how many each row fires
  uint32_t unused[2];
};
static_assert(sizeof(ThinGroup) % 16 == 0);

// In `hidden`: first that of each group, [12 quads of neurons of its list][rows up to those of tiles][4], then the groups.
template <typename T>
struct ThinSpace {
  T* hidden;
  ThinGroup* group;
  int groups;
  __device__ __forceinline__ explicit ThinSpace(const Ffn& f) {
    groups = (f.d_ff + kThinNeurons - 1) / kThinNeurons, hidden = static_cast<T*>(f.hidden);
    group = reinterpret_cast<ThinGroup*>(hidden + static_cast<int64_t>(groups) * kThinNeurons * kThinRows);
  }
};

}  // namespace twell::hopper
