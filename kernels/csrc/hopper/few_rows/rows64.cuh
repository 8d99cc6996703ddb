// From 17 to 64 rows, and one wave of CTAs: the time is that of reading each weight once, and of waits. Two launches
// that overlap, and no plan.
//
// In `rows64_gate_up` a CTA has 48 neurons and all rows: their gate rows stream through a ring of stages, and it
// computes the up product of those that any row fires at once. `rows64_down` goes over the union, a cluster for 64
// outputs, each of whose CTAs takes a third of the union, or a sixth where outputs are few; their sums are added in one
// order. Clusters of four would not use all multiprocessors, and two CTAs on one take twice as long. Products this
// small last as long as their latency, about 70 cycles for 16 of k: warpgroups divide k, and add their sums at the end.
//
// The launches hand on (hidden, in `Ffn`): [d_ff][rows padded to a multiple of 64], with the neurons of the union
// alone. In `unions`, for each 48 neurons: 64 bits, those that fired; then, for each, a bit a row that is not finite.
// In `masks`, for each, how many fired in each row, a byte. `pack_words` turns the values, dense in `spill`, into words
// if these are requested, and writes them before the counts are read.
#pragma once

#include "common/bits.cuh"
#include "hopper/ring.cuh"

namespace twell::hopper {

constexpr int kRows64Words = kRows64Max / 32, kRows64Producers = 128, kRows64Stages = 16;
constexpr int kRows64Gathered = 32;  // with more neurons than this, all 48 up weights are fetched, else one by one
constexpr int kRows64WeightBytes = kGroupNeurons * kTileK * 2;
constexpr int kDownOutputs = 64;

// How the launcher divides `rows64_gate_up`.
struct Rows64Shape {
  int stages;  // of the ring
  int box;     // rows that are fetched
  bool even;   // d_model is a multiple of 64: one copy fetches all tiles of a stage
  bool dense;  // the gate values are requested in `spill`
  constexpr int row_bytes() const { return box * kTileK * 2; }
};

struct Rows64Marks {
  uint64_t* fired;   // [groups], bit i: neuron 48 * group + i
  uint32_t* broken;  // [groups][words]
  uint8_t* counts;   // [groups][rows]
  int groups;
  __device__ __forceinline__ explicit Rows64Marks(const Ffn& f) {
    groups = (f.d_ff + kGroupNeurons - 1) / kGroupNeurons;
    fired = reinterpret_cast<uint64_t*>(f.unions), broken = reinterpret_cast<uint32_t*>(fired + groups);
    counts = reinterpret_cast<uint8_t*>(f.masks);
  }
};

// A bit for each of eight values that is not zero; none is negative.
__device__ __forceinline__ uint32_t positive(const uint4& v) {
  const auto signs = [](uint32_t pair) { return (pair + 0x7fff7fffu) & 0x80008000u; };
  const uint32_t even = signs(v.x) >> 15 | signs(v.y) >> 13 | signs(v.z) >> 11 | signs(v.w) >> 9;
  return (even | even >> 15) & 0xffu;  // the odd columns' bits were 16 further
}

// Writes words from the dense values in `spill`: a warp for a tile of a row, a lane for eight columns.
template <typename T>
__global__ void __launch_bounds__(32) pack_words(const Ffn f) {
  const int row = blockIdx.x, tile = blockIdx.y, lane = threadIdx.x;
  const int64_t at = static_cast<int64_t>(row) * f.tiles + tile;
  const bool there = tile * kTile + 8 * lane < f.d_ff;
  uint4* chunk = static_cast<uint4*>(f.spill) + at * (kTile / 8) + (lane ^ (row & 7));
  if (!there) *chunk = make_uint4(0, 0, 0, 0);
  const uint4 v = *chunk;
  const uint32_t mask = positive(v), pair[4] = {v.x, v.y, v.z, v.w};
  const int upto = sum_upto(__popc(mask), lane);
  const auto write = [&](int slot, uint32_t word) {
    (slot < kHead ? f.heads + at * kHead : f.tails + at * kTail - kHead)[slot] = word;
  };
  const int count = __shfl_sync(~0u, upto, 31);
  // whole eights, in which they are read
  if (lane == 0 || (lane > count && lane / kHead == count / kHead)) write(lane, lane == 0 ? count : 0);
  int slot = upto - __popc(mask) + 1;
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (mask >> e & 1) {
      if (slot <= kSlots) write(slot, (8 * lane + e) | (pair[e / 2] >> (16 * (e & 1)) & 0xffffu) << 16);
      ++slot;
    }
}

}  // namespace twell::hopper
