// g and h of a call of which much fires, as matrices [rows, d_ff] in the memory that values would take: a backward pass
// that reads them makes neither product again. Whether a call is kept so is decided by the rows of its first launch,
// for all of its rows.
//
// A warp for a row, eight columns to a lane. h comes from the panels; in a gated FFN g from `spill`, or from its words
// where a row's tile is not there. Rows that are not finite are left out: their call makes all of it again.
#pragma once

#include "hopper/backward/keep.cuh"

namespace twell::hopper {

// Whether the call is kept whole: all CTAs of all launches agree. first: as in read_union, after which it is called
template <typename T, typename... First>
__device__ __forceinline__ bool keeps_whole(const Keeping<T>& keeping, First...) {
  const Ffn& f = keeping.f;
  const Kept& k = keeping.k;
  bool whole;
  if constexpr (sizeof...(First) > 0) {
    whole = *k.used == kKeptWhole;
  } else {
    int fired = 0;  // nnz is 0 where a row is not finite
#pragma unroll 8
    for (int row = threadIdx.x; row < f.rows; row += kKeepThreads) fired += f.nnz[row];
    fired = __reduce_add_sync(~0u, fired);
    if (keeping.lane == 0) atomicAdd(keeping.fired, fired);
    __syncthreads();
    whole = *keeping.fired > static_cast<int64_t>(k.whole_from) * f.rows;
  }
  if (whole && keeping.rank == 0 && threadIdx.x == 0)
    *k.used = kKeptWhole, k.union_sizes[keeping.block] = f.union_sizes[keeping.block];
  return whole;
}

// Eight hidden values of a row of the block, from `neuron` on, a multiple of 8. kAll: the union is every neuron
template <bool kAll, typename T>
__device__ __forceinline__ uint4 eight_hidden(const Keeper<T>& keeper, int in_block, int neuron) {
  if constexpr (kAll) {
    const unsigned char* line = hidden_panel(keeper.f, keeper.block, neuron / kPanelColumns) + in_block * 128;
    return *reinterpret_cast<const uint4*>(line + (((neuron >> 3) ^ in_block) & 7) * 16);
  } else {
    const uint32_t in_union = keeper.bits[neuron >> 5] >> (neuron & 24);
    uint32_t pairs[4] = {};
    int rank = keeper.rank_of(neuron);
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (in_union >> e & 1) pairs[e / 2] |= static_cast<uint32_t>(keeper.hidden(in_block, rank++)) << 16 * (e % 2);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// A lane's eight gate values of a row's tile that is in `spill`.
__device__ __forceinline__ uint4 eight_spilled(const Ffn& f, int row, int tile, int lane) {
  return static_cast<const uint4*>(f.spill)[(static_cast<int64_t>(row) * f.tiles + tile) * 32 + (lane ^ (row & 7))];
}

// The same of any tile, whose first word is `word`. line: 32 of them, of the warp; by all of its lanes
__device__ __forceinline__ uint4 eight_gates(const Ffn& f, int row, int tile, uint32_t word, uint4* line, int lane) {
  if (word > kSlots) return eight_spilled(f, row, tile, lane);
  const int64_t at = static_cast<int64_t>(row) * f.tiles + tile;
  line[lane] = uint4{};
  __syncwarp();
  if (lane > 0 && lane <= word) {
    const uint32_t slot = lane < kHead ? f.heads[at * kHead + lane] : f.tails[at * kTail + lane - kHead];
    reinterpret_cast<uint16_t*>(line)[slot & 0xffff] = slot >> 16;
  }
  __syncwarp();
  const uint4 eight = line[lane];
  __syncwarp();  // before the next tile's zeros
  return eight;
}

template <typename T>
__device__ __forceinline__ float sum_of_sizes(const uint4& eight) {
  float sum = 0.f;
  for (const uint32_t pair : {eight.x, eight.y, eight.z, eight.w})
    sum += fabsf(half_of<T>(pair, 0)) + fabsf(half_of<T>(pair, 1));
  return sum;
}

// Writes the rows of this CTA; returns this lane's sum of |h|. kAll: as above; kSpilled: all tiles of the block are in
// `spill`; kPlain: without an up branch
template <bool kAll, bool kSpilled, bool kPlain, typename T>
__device__ __forceinline__ float write_rows_whole(const Keeping<T>& keeping) {
  constexpr int kAhead = 4;  // tiles whose loads are in flight
  const Ffn& f = keeping.f;
  const int lane = keeping.lane, eights = f.d_ff / 8;
  const int64_t matrix = static_cast<int64_t>(keeping.k.rows) * eights;
  uint4* const line =
      reinterpret_cast<uint4*>((reinterpret_cast<uintptr_t>(keeping.values) + 15) / 16 * 16) + keeping.warp * 32;
  float sum = 0.f;
  keeping.each_row([&](int in_block, int row, bool counts_here) {
    uint4* const first = reinterpret_cast<uint4*>(keeping.k.whole) + static_cast<int64_t>(row) * eights;
    uint4* const second = kPlain ? first : first + matrix;
#pragma unroll 1
    for (int tile0 = 0; tile0 < f.tiles; tile0 += kAhead) {
      uint4 gates[kAhead], hidden[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (32 * (tile0 + i) + lane >= eights) continue;
        hidden[i] = eight_hidden<kAll>(keeping.keeper, in_block, 8 * (32 * (tile0 + i) + lane));
        if (kSpilled && !kPlain) gates[i] = eight_spilled(f, row, tile0 + i, lane);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = 32 * (tile0 + i) + lane;
        if (at >= eights) continue;
        sum += counts_here ? sum_of_sizes<T>(hidden[i]) : 0.f;
        __stcs(second + at, hidden[i]);
        if (kSpilled && !kPlain) __stcs(first + at, gates[i]);
      }
    }
    if constexpr (!kSpilled && !kPlain) {
#pragma unroll 1
      for (int tile = 0; tile < f.tiles; ++tile) {
        const uint4 gates =
            eight_gates(f, row, tile, f.heads[(static_cast<int64_t>(row) * f.tiles + tile) * kHead], line, lane);
        if (32 * tile + lane < eights) __stcs(first + 32 * tile + lane, gates);
      }
    }
  });
  return sum;
}

template <typename T>
__device__ __forceinline__ float write_whole(const Keeping<T>& keeping) {
  const bool all = keeping.keeper.all;
  float sum;
  if (keeping.f.w_up == nullptr)
    sum = all ? write_rows_whole<true, false, true>(keeping) : write_rows_whole<false, false, true>(keeping);
  else if (keeping.f.union_sizes[keeping.block] < 0)
    sum = write_rows_whole<true, true, false>(keeping);
  else
    sum = all ? write_rows_whole<true, false, false>(keeping) : write_rows_whole<false, false, false>(keeping);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

}  // namespace twell::hopper
