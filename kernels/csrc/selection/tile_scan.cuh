// The same scan of firings with a CTA for a tile of columns and some of the rows, in place of a warp for a row.
//
// What a firing needs is then in shared memory: the counts of the tile's neurons by value, and what a firing needs at
// least to enter a list. That starts as the bounds of earlier batches, and rises with the last key of a list each time
// one is looked at: a key below it was in no list before, and is in none now, as the last key of a list only grows. So
// global memory sees the words once, the few firings that may enter a list, and the counts at the end.
//
// A warp takes 32 rows, a lane each, as most tiles have a few words. A tile past its slots is read by the whole warp,
// eight values a lane.
#pragma once

#include "selection/selection.cuh"

namespace twell::selection {

constexpr int kTileThreads = 256, kTileWarps = kTileThreads / 32;
constexpr int kTileCtas = 4;  // of a multiprocessor, at tiles of 256
constexpr int kAtOnce = 8;    // values that a lane reads at once, of a tile past its slots
constexpr int kQuad = 4;      // words that it reads at once, of others

// Bytes of shared memory for a tile of so many columns: its counts, greatest draws, and least values.
__host__ __device__ constexpr int tile_scan_bytes(int tile) { return tile * (kBins + kBands + 1) * 4; }

// Whether the words of a tile, and the values of one past its slots, can be read 16 bytes at a time.
inline bool reads_by_16_bytes(const Packed& p) {
  const auto at = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  return at(p.heads) && at(p.tails) && at(p.spill) && p.head_words % kQuad == 0 && (p.slots + 1) % kQuad == 0;
}

template <typename V>
struct TileScan {
  using Raw = typename V::Raw;
  const Packed& p;
  const Rows& rows;
  const Layer& layer;
  int number;  // of the tile
  int* fires;  // [kBins][tile], each column at `place_of`
  int* most;   // [kBands][tile]: the greatest draw that may enter
  int* least;  // [tile]: the least value that may enter, as bits

  // Where a column's numbers are: eight columns in a row, which a lane reads, are in the same bank, those of other
  // lanes in others.
  __device__ __forceinline__ int place_of(int column) const {
    return column % kAtOnce * (p.tile / kAtOnce) + column / kAtOnce;
  }
  __device__ __forceinline__ int column_at(int place) const {
    return place % (p.tile / kAtOnce) * kAtOnce + place / (p.tile / kAtOnce);
  }
  __device__ __forceinline__ int neuron_of(int column) const { return number * p.tile + column; }

  __device__ __forceinline__ void begin() const {
    for (int i = threadIdx.x; i < kBins * p.tile; i += kTileThreads) fires[i] = 0;
    for (int place = threadIdx.x; place < p.tile; place += kTileThreads) {
      const int64_t neuron = neuron_of(column_at(place));
      if (neuron >= layer.d_ff) continue;
      least[place] = bits_of(layer.value_bound[neuron]);
      for (int band = 0; band < kBands; ++band) most[band * p.tile + place] = layer.draw_bound[neuron * kBands + band];
    }
  }

  __device__ __forceinline__ void finish() const {
    for (int i = threadIdx.x; i < kBins * p.tile; i += kTileThreads) {
      const int neuron = neuron_of(column_at(i % p.tile));
      if (fires[i] != 0) atomicAdd(&layer.fires[static_cast<int64_t>(neuron) * kBins + i / p.tile], fires[i]);
    }
  }

  // Inserts a key, and returns the last one that was in the list: 0 while there was room.
  __device__ __forceinline__ Key enter(Key* list, Key key) const {
    const Key last = glance(list[layer.k - 1]);
    if (last < key) insert(list, layer.k, key);
    return last;
  }

  // Counts a firing of a row that is counted, and inserts it if the row is eligible and the firing may enter.
  __device__ __forceinline__ void take(int column, Raw raw, int row, bool eligible, uint64_t state) const {
    const int64_t neuron = neuron_of(column);
    if (column >= p.tile || neuron >= layer.d_ff) return;  // of a row that is not finite
    const float value = V::number(raw);
    const int bin = bin_of(value), place = place_of(column);
    atomicAdd(&fires[bin * p.tile + place], 1);
    if (!eligible) return;
    if (value >= __int_as_float(least[place]))
      if (const Key last = enter(layer.keys + neuron * layer.k, top_key(value, row)); last != 0)
        atomicMax(&least[place], static_cast<int>(last >> 32));
    const int draw = static_cast<int>(mixed(state, neuron) >> 33), band = bin / 2;
    if (draw <= most[band * p.tile + place])
      if (const Key last = enter(layer.bands + (neuron * kBands + band) * layer.k, sample_key(draw, row)); last != 0)
        atomicMin(&most[band * p.tile + place], static_cast<int>((kMostKey - last) >> 32));
  }

  // The words of a tile that fits its slots, by a lane. quad: its first ones, with the count.
  __device__ __forceinline__ void take_words(const Tile& tile, uint4 quad, int row, bool eligible,
                                             uint64_t state) const {
#pragma unroll 1
    for (int i = 0; i <= tile.count; ++i) {
      if (i % kQuad == 0 && i > 0)
        quad = *reinterpret_cast<const uint4*>((i < p.head_words ? tile.head : tile.tail) + i);
      if (i > 0) take(static_cast<int>(quad.x & 0xffff), V::of_slot(p, tile.at, i - 1, quad.x), row, eligible, state);
      quad = make_uint4(quad.y, quad.z, quad.w, 0);
    }
  }

  // The values of a tile past its slots, by a warp.
  __device__ __forceinline__ void take_values(int64_t first, int swizzle, int lane, int row, bool eligible,
                                              uint64_t state) const {
    for (int at = kAtOnce * lane; at < p.tile; at += 32 * kAtOnce) {
      uint4 values = *reinterpret_cast<const uint4*>(static_cast<const Raw*>(p.spill) + first + at);
#pragma unroll 1
      for (int i = 0; i < kAtOnce; ++i) {
        const Raw raw = values.x & 0xffff;
        if (V::number(raw) != 0.f) take((at ^ swizzle) + i, raw, row, eligible, state);
        values = make_uint4(__funnelshift_r(values.x, values.y, 16), __funnelshift_r(values.y, values.z, 16),
                            __funnelshift_r(values.z, values.w, 16), values.w >> 16);
      }
    }
  }

  // 32 rows, by a warp.
  __device__ __forceinline__ void take_rows(int row0, int lane) const {
    const int row = row0 + lane;
    const bool counted = row < rows.n && rows.counted[row] != 0;
    const Tile tile(p, counted ? row : 0, number);
    const bool fires_any = counted && tile.count > 0, spills = fires_any && tile.count > p.slots;
    const bool eligible = fires_any && rows.eligible[row] != 0;
    const uint64_t state = eligible ? state_of(rows, layer, row) : 0;
    if (fires_any && !spills) take_words(tile, *reinterpret_cast<const uint4*>(tile.head), row, eligible, state);
    __syncwarp();
    const int64_t first = spills ? tile.spilled(p) : 0;
    for (uint32_t left = __ballot_sync(~0u, spills); left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1, its_row = row0 + from;
      take_values(__shfl_sync(~0u, first, from), swizzle_of(p, its_row), lane, its_row,
                  __shfl_sync(~0u, eligible, from), __shfl_sync(~0u, state, from));
      __syncwarp();
    }
  }
};

// groups: of CTAs that share a tile's rows.
template <typename T>
__global__ void __launch_bounds__(kTileThreads, kTileCtas)
    scan_tiles(const Packed p, const Rows rows, const Layer layer, int groups) {
  extern __shared__ int numbers[];
  int* const most = numbers + kBins * p.tile;
  const TileScan<Value<T>> scan{
      p, rows, layer, static_cast<int>(blockIdx.x) % p.tiles, numbers, most, most + kBands * p.tile};
  const int group = blockIdx.x / p.tiles, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  scan.begin();
  __syncthreads();
  for (int row0 = 32 * (group * kTileWarps + warp); row0 < rows.n; row0 += 32 * groups * kTileWarps)
    scan.take_rows(row0, lane);
  __syncthreads();
  scan.finish();
}

}  // namespace twell::selection
