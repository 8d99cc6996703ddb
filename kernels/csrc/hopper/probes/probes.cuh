// The probes, computed from the words: histograms of how full tiles are, and sums of each neuron's values. With many
// rows both read only what is written before `down` lets them begin, and use processors as `down` leaves them.
#pragma once

#include "common/bits.cuh"
#include "common/probes.cuh"
#include "hopper/many_rows/plan.cuh"

namespace twell::hopper {

constexpr int kCountThreads = 512, kCountWarps = kCountThreads / 32, kCountCtas = 3;  // CTAs of a multiprocessor
constexpr int kSumTiles = 4;  // tiles of a CTA of the neurons' sums
constexpr int kBatch = 32;    // rows that a warp takes at a time, a lane each
constexpr int kPiece = 4;     // words that a lane reads at a time
using NeuronSums = Sums<kSumTiles * kTile>;

// Values that a warp has collected: fewer than a lane each from before, and those that its lanes read at a time. Each
// is value << 16 | row of the batch << 10 | column in the CTA, so that each lane has one value, however uneven rows and
// tiles are.
struct FoundValues {
  uint32_t values[32 + 32 * kPiece];
};
static_assert(kSumTiles * kTile == 1 << 10 && kBatch == 32);

struct CountShared {
  NeuronSums sums;
  FoundValues found[kCountWarps];
  int taken;  // rows
};

static __global__ void __launch_bounds__(kCountThreads) count_rows(const Ffn f, const Counts out) {
  __shared__ uint32_t histograms[2 * (kTile + 1)];
  let_next_launch();
  count_tiles(out, f.finite, f.rows, f.tiles, kTile, histograms, [&](int row, int tile) {
    return static_cast<int>(f.heads[(static_cast<int64_t>(row) * f.tiles + tile) * kHead] & kCount);
  });
  if (blockIdx.x == 0) wait_for_launches();  // so that this does not end before `down`
}

// Clears nnz_used of rows that are not finite, once every row is known to be finite or not.
static __global__ void __launch_bounds__(kCountThreads) clear_used(const Ffn f) {
  const int row = blockIdx.x * kCountThreads + threadIdx.x;
  if (row < f.rows && !f.finite[row]) f.nnz_used[row] = 0;
}

// Appends a lane's values of a piece of a tile's words to the warp's values, of which `waiting` are present; returns
// how many are present then. slot: the piece's first; last: the last used slot of the tile; place: the row's and the
// tile's bits of a value.
__device__ __forceinline__ int append_values(uint32_t* found, int waiting, const uint4& piece, int slot, int last,
                                             uint32_t place, int lane) {
  const uint32_t word[kPiece] = {piece.x, piece.y, piece.z, piece.w};
  const int begin = slot == 0, many = max(0, min(kPiece, last + 1 - slot) - begin);
  const int upto = sum_upto(many, lane);
  uint32_t* to = found + waiting + upto - many - begin;
#pragma unroll
  for (int e = 0; e < kPiece; ++e)
    if (e >= begin && e < begin + many) to[e] = (word[e] & 0xffff0000u) | place | (word[e] & 0xffu);
  return waiting + __shfl_sync(~0u, upto, 31);
}

// Adds the values of a tile in `spill`, a column to each lane. there: the row's and the tile's bits of a value.
template <typename Add>
__device__ __forceinline__ void add_spilled(const Ffn& f, int row0, int tile0, uint32_t there, int lane, Add add) {
  const int r = row0 + (there >> 10), tile = tile0 + (there >> 8 & (kSumTiles - 1));
  const uint16_t* dense = static_cast<const uint16_t*>(f.spill) + (static_cast<int64_t>(r) * f.tiles + tile) * kTile;
#pragma unroll 4
  for (int column = lane; column < kTile; column += 32) {
    const uint32_t value = dense[column ^ (r & 7) << 3];
    add(value << 16 | there | column, value != 0);
  }
}

// A CTA has `rows` rows, which its warps take in batches as they become free.
template <typename T>
__global__ void __launch_bounds__(kCountThreads, kCountCtas) count_neurons(const Ffn f, const Counts out, int rows) {
  extern __shared__ uint4 raw[];
  CountShared& s = *reinterpret_cast<CountShared*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = blockIdx.x * rows, end = min(f.rows, first + rows), tile0 = blockIdx.y * kSumTiles;
  uint32_t* found = s.found[warp].values;
  if (threadIdx.x == 0) s.taken = 0;
  s.sums.begin();
  for (;;) {
    int row0 = lane == 0 ? first + atomicAdd(&s.taken, kBatch) : 0;
    row0 = __shfl_sync(~0u, row0, 0);
    if (row0 >= end) break;
    const int mine = min(row0 + lane, end - 1), my_token = out.tokens[mine], my_sequence = out.sequences[mine];
    const bool counted = f.finite[mine] & (out.counted == nullptr || out.counted[mine]);
    const uint32_t count_them = __ballot_sync(~0u, counted && row0 + lane < end);
    int waiting = 0;  // in `found`
    const auto add = [&](uint32_t value, bool there) {
      const int row = value >> 10 & (kBatch - 1), token = __shfl_sync(~0u, my_token, row),
                sequence = __shfl_sync(~0u, my_sequence, row);
      if (there) s.sums.add(value & 1023, half_of<T>(value, 1), token, sequence);
    };
#pragma unroll 1
    for (int i = lane; i < kBatch * kSumTiles; i += 32) {
      const int row = i / kSumTiles, which = i % kSumTiles;
      const int64_t at = static_cast<int64_t>(row0 + row) * f.tiles + tile0 + which;
      const bool there = count_them >> row & 1 && tile0 + which < f.tiles;
      const uint32_t* words = f.heads + at * kHead;
      uint4 piece = there ? *reinterpret_cast<const uint4*>(words) : uint4{};
      const uint32_t count = piece.x, place = row << 10 | which << 8;
      const int last = count <= kSlots ? count : 0;  // the last used slot
      for (int slot = 0; __any_sync(~0u, slot < last + (slot > 0));) {
        waiting = append_values(found, waiting, piece, slot, last, place, lane);
        slot += kPiece;
        if (slot <= last)
          piece = *reinterpret_cast<const uint4*>(slot < kHead ? words + slot : f.tails + at * kTail + slot - kHead);
        __syncwarp();
        for (; waiting >= 32; waiting -= 32) add(found[waiting - 32 + lane], true);
        __syncwarp();
      }
      for (uint32_t whole = __ballot_sync(~0u, count > kSlots); whole; whole &= whole - 1) {
        add_spilled(f, row0, tile0, __shfl_sync(~0u, place, __ffs(whole) - 1), lane, add);
      }
    }
    __syncwarp();
    add(found[lane], lane < waiting);
    __syncwarp();
  }
  s.sums.finish(out, tile0 * kTile);
  if (blockIdx.x == 0 && blockIdx.y == 0) wait_for_launches();  // so that this does not end before `down`
}

}  // namespace twell::hopper
