// Up to 16 rows and two waves of CTAs: the time is that of reading each weight once, and of waits. Two launches that
// overlap, and no plan.
//
// In `rows16_gate_up` a CTA has a group of kNeurons, 48 or 64, and all rows; it computes the up product of those that
// any row fires at once. `rows16_down` goes over what fired, a cluster of four CTAs for 64 outputs. In both, warps
// divide the sum over k: each has a ring of its own, which the copy engine fills and no other warp waits for, and the
// sums are added at the end, in one order. Weights are the rows of the products, and the call's rows their columns,
// eight in a tile. The two launches leave room for each other on a multiprocessor: `rows16_down` starts when
// `rows16_gate_up` has hardly begun, and takes from memory what that hands on, as it comes: lists, whose weights it
// requests at once, then the hidden state. It starts when all CTAs of the other run, so none of these waits for room
// that it has; and when they have waited for the launches before, so it may write what those read.
#pragma once

#include "common/sm80.cuh"
#include "hopper/gemm.cuh"

namespace twell::hopper {

constexpr int kRows16Gathered = 32;  // with more neurons than this, the whole group is fetched, else one by one
// A group of neurons of 64 k, or of 64 outputs.
template <int kNeurons>
constexpr int kRows16BoxBytes = kNeurons * 128;
constexpr int kRows16Warps = 8, kRows16Threads = 32 * kRows16Warps;  // warps that multiply

// What is handed on tells by itself whether it has come: each word, or unit of two words that are written at once, has
// all bits set until then. No list has such a neuron, and no hidden state such a value (NaN is kNanPair).
constexpr uint32_t kUnwritten = ~0u;
constexpr int kBrokenGate = 8;  // the first of a count's bits that mark rows

__device__ __forceinline__ bool is_written(uint2 unit) { return unit.y != kUnwritten; }

// Calls read(), which returns whether a lane has read what it waits for, until all lanes have.
template <typename Read>
__device__ __forceinline__ void until_written(Read read) {
  while (!__all_sync(~0u, read())) {
  }
}

// What the gate and up products of a group write, besides the hidden state.
template <int kNeurons>
struct Rows16Group {
  // in units: the neurons that any row fires, ascending, counted from 1, unless all are taken; then zeros
  uint16_t list[kNeurons];
  // how many, or kNeurons if all are taken; from kBrokenGate on a bit a row whose gate values are not finite
  uint32_t count;
  uint32_t broken;                  // a bit a row that is not finite; written last
  uint32_t counts[kRows16Max / 4];  // how many each row fires, a byte each
  uint32_t unused[2];
};
static_assert(sizeof(Rows16Group<kGroupNeurons>) % 16 == 0 && sizeof(Rows16Group<kWideGroup>) % 16 == 0);

// In `hidden`: first the hidden state of each group, [quads of neurons of its list][rows, padded to tiles][4], in
// units; then the groups.
template <typename T, int kNeurons>
struct Rows16Space {
  T* hidden;
  Rows16Group<kNeurons>* group;
  int groups;
  __device__ __forceinline__ explicit Rows16Space(const Ffn& f) {
    groups = (f.d_ff + kNeurons - 1) / kNeurons, hidden = static_cast<T*>(f.hidden);
    group = reinterpret_cast<Rows16Group<kNeurons>*>(hidden + static_cast<int64_t>(groups) * kNeurons * kRows16Max);
  }
};

}  // namespace twell::hopper
