// From TwELL to panels: how the plan reads the words of a block's rows, and writes each value at its neuron's rank in
// the union.
#pragma once

#include "hopper/many_rows/row_order.cuh"

namespace twell::hopper {

constexpr int kPlanWarps = kPlanThreads / 32;
// panels at a time; they have as many columns as a tile
constexpr int kGroup = 4, kGroupColumns = kGroup * kPanelColumns;
static_assert(kGroupColumns == kTile);
constexpr int kOffsetTiles = 8;                             // tiles whose columns' offsets are computed at once
constexpr int kHighNnzReaders = kPlanThreads / kBlockRows;  // threads for each row, in blocks of high nnz
constexpr uint16_t kNoOffset = 0xffff;  // in place of an offset: the group does not have that neuron

// A value's offset in a group's panels, in bytes: that of its column ^ that of its row. A row has 128 bytes of a panel,
// whose 16-byte chunks are swizzled for the tensor cores.
__device__ __forceinline__ uint32_t offset_of_column(int column) {
  return (column / kPanelColumns * kPanelBytes) | (column % kPanelColumns * 2);
}
__device__ __forceinline__ uint32_t offset_of_row(int row) { return row * 128 | (row & 7) << 4; }

__device__ __forceinline__ void put(unsigned char* panels, int row, uint32_t column_offset, uint16_t value) {
  if (column_offset != kNoOffset) *reinterpret_cast<uint16_t*>(panels + (column_offset ^ offset_of_row(row))) = value;
}
// Writes eight neighbouring values; `offsets` has their columns' offsets, two in a word.
__device__ __forceinline__ void put_eight(unsigned char* panels, int row, const uint4& column_offsets, const uint4& v) {
  const uint32_t offset[4] = {column_offsets.x, column_offsets.y, column_offsets.z, column_offsets.w},
                 pair[4] = {v.x, v.y, v.z, v.w};
  const uint32_t first = offset[0] & 0xffff, last = offset[3] >> 16;
  if (first % 16 == 0 && last == first + 14) {  // a chunk
    *reinterpret_cast<uint4*>(panels + (first ^ offset_of_row(row))) = v;
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) put(panels, row, offset[e / 2] >> 16 * (e % 2) & 0xffff, pair[e / 2] >> 16 * (e % 2));
  }
}

// The union: bits [words], a bit a neuron, and before [words], how many of its neurons precede each word. all: it is
// every neuron, and a neuron's rank is its number.
struct Union {
  uint32_t* bits;
  int* before;
  int words;
  const int& size;
  bool all = false;
  __device__ __forceinline__ int panels() const { return (size + kPanelColumns - 1) / kPanelColumns; }
  __device__ __forceinline__ int rank_of(int neuron) const {
    const int word = neuron >> 5;
    return all ? neuron : before[word] + __popc(bits[word] & ((1u << (neuron & 31)) - 1));
  }
};

// Offsets in the group's panels of the values of eight neurons from `neuron` on, two in a word; kNoOffset: not in this
// group.
__device__ __forceinline__ uint4 offsets_of_eight(const Union& u, int neuron, int first) {
  const uint32_t in_union = u.all ? ~0u : u.bits[neuron >> 5] >> (neuron & 24);
  uint32_t pairs[4] = {};
  int at = u.rank_of(neuron) - first;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const bool has = in_union >> e & 1;
    pairs[e / 2] |= (has && static_cast<unsigned>(at) < kGroupColumns ? offset_of_column(at) : kNoOffset)
                    << 16 * (e % 2);
    at += has;
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// How the threads of a plan read the words of the block's finite rows.
struct BlockRows {
  const Ffn& f;
  const int* order;  // [128], of the block; -1: no row, or none that is finite
  int warp, lane;

  __device__ __forceinline__ int64_t at(int row, int tile) const {
    return static_cast<int64_t>(order[row]) * f.tiles + tile;
  }

  // A tile's first word, or -1 if there is no row or it is not finite.
  __device__ __forceinline__ int first_word(int row, int tile) const {
    return order[row] >= 0 ? static_cast<int>(f.heads[at(row, tile) * kHead]) : -1;
  }

  // Calls tile(row, tile, first word) for every row and each of `many` tiles from `first` on, with whole warps, row
  // after row.
  template <typename Tile>
  __device__ __forceinline__ void each_tile(int first, int many, Tile tile) const {
    for (int i = warp * 32; i < kBlockRows * many; i += kPlanThreads) {
      const int row = static_cast<int>(__fdividef(i + lane + 0.5f, many)), which = first + i + lane - row * many;
      tile(row, which, first_word(row, which));
    }
  }

  // Calls one(column of the tile, value) for a reader's slots of a tile that fits its slots.
  template <int kReaders, typename One>
  __device__ __forceinline__ void each_slot(int row, int tile, int count, int reader, One one) const {
    for (int first = reader * kHead; first <= count && count > 0; first += kReaders * kHead) {
      const uint32_t* words =
          first == 0 ? f.heads + at(row, tile) * kHead : f.tails + at(row, tile) * kTail + first - kHead;
      const uint4 low = reinterpret_cast<const uint4*>(words)[0], high = reinterpret_cast<const uint4*>(words)[1];
      const uint32_t word[kHead] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kHead; ++i)
        if (first + i > 0 && first + i <= count)
          one(static_cast<int>(word[i] & 0xffffu), static_cast<uint16_t>(word[i] >> 16));
    }
  }

  // Writes the rows of tiles ends[0] to ends[1] into the panels, each column at its entry of `column_offsets`, or
  // nowhere: tiles in `spill` if `spilled`, and tiles in words if `in_words`. find_offsets(first) is called for each
  // kOffsetTiles tiles. A warp takes some rows of one tile, then of the next, so that all warps have rows past their
  // slots.
  template <typename Find>
  __device__ __forceinline__ void put_tiles(unsigned char* panels, const uint16_t* column_offsets, const int* ends,
                                            bool in_words, bool spilled, Find find_offsets) const {
    constexpr int kAhead = 2;  // loads in flight
    const int row = threadIdx.x / kHighNnzReaders, reader = threadIdx.x % kHighNnzReaders;
    int next = first_word(row, ends[0]);
#pragma unroll 1
    for (int tile = ends[0]; tile <= ends[1]; ++tile) {
      const int word = next, at = (tile - ends[0]) % kOffsetTiles;
      if (at == 0) find_offsets(tile);
      if (tile < ends[1]) next = first_word(row, tile + 1);
      const uint16_t* of_tile = column_offsets + at * kTile;
      if (in_words && word <= kSlots)
        each_slot<kHighNnzReaders>(row, tile, word, reader,
                                   [&](int column, uint16_t value) { put(panels, row, of_tile[column], value); });
      const uint4 eight = reinterpret_cast<const uint4*>(of_tile)[lane];  // this lane's columns
      const bool needs_task = (eight.x & eight.y & eight.z & eight.w) != ~0u;
      const uint4* values = static_cast<const uint4*>(f.spill) + tile * (kTile / 8);
      for (uint32_t over = __ballot_sync(~0u, spilled && word > kSlots && reader == 0), now = over; over; now = over) {
        uint4 v[kAhead];
        const auto next_row = [&](uint32_t& lanes) {
          const int at = (warp * 32 + __ffs(lanes) - 1) / kHighNnzReaders;
          lanes &= lanes - 1;
          return at;
        };
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
          if (over)
            if (const int r = order[next_row(over)]; needs_task)
              v[i] = values[int64_t{r} * (f.tiles * (kTile / 8)) + (lane ^ (r & 7))];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
          if (now)
            if (const int r = next_row(now); needs_task) put_eight(panels, r, eight, v[i]);
      }
    }
  }
};

}  // namespace twell::hopper
