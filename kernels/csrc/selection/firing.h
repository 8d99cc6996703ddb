// What is done with a single firing, and with a window of them, on a GPU and on a CPU alike: only who does it differs.
//
// A list is k keys, greatest first. A key goes down it: in each place the greater one stays, and the other goes on. A
// place thus passes on all but the greatest that it ever gets, whatever the order, and only grows; so one that holds a
// greater key is passed by without an atomic, and a key that is not greater than the last one is not inserted at all.
//
// V, a type of values: Raw, as stored; of_slot(p, at, slot, word): that of a slot of the at-th tile; of_spill(p, at):
// the at-th of `spill`; number(raw): as float32; kNaN. The includer has atomicAdd, atomicMax, `glance` and `bits_of`.
#pragma once

#include "selection/selection.h"

#ifdef __CUDACC__
#define TWELL_FIRING __device__ __forceinline__
#else
#define TWELL_FIRING inline
#endif

namespace twell::selection {

constexpr int kFirstBits = 2 * (127 - 9);  // exponent and first bit of the mantissa of 2^-9, where bin 0 begins
constexpr Key kMostKey = ~0ull >> 1;

// The next state of splitmix64.
TWELL_FIRING uint64_t mixed(uint64_t state, uint64_t number) {
  state += number + 0x9e3779b97f4a7c15ull;
  state = (state ^ state >> 30) * 0xbf58476d1ce4e5b9ull;
  state = (state ^ state >> 27) * 0x94d049bb133111ebull;
  return state ^ state >> 31;
}

TWELL_FIRING void insert(Key* list, int k, Key key) {
  if (glance(list[k - 1]) >= key) return;
  for (int place = 0; place < k && key != 0; ++place) {
    if (glance(list[place]) >= key) continue;
    const Key before = atomicMax(&list[place], key);
    if (before < key) key = before;  // it goes on
  }
}

// Where a tile's words and its place in `spill` are.
struct Tile {
  int64_t at;
  const uint32_t *head, *tail;
  int count;
  TWELL_FIRING Tile(const Packed& p, int row, int tile) : at(static_cast<int64_t>(row) * p.tiles + tile) {
    head = p.heads + at * p.head_words, tail = p.tails + at * (p.slots + 1 - p.head_words) - p.head_words;
    count = static_cast<int>(head[0]);
  }
  TWELL_FIRING uint32_t word(const Packed& p, int i) const { return i < p.head_words ? head[i] : tail[i]; }
  TWELL_FIRING int64_t spilled(const Packed& p) const {
    return (p.spill_index != nullptr ? p.spill_index[at] : at) * p.tile;
  }
};

// By how much columns are apart from their places in `spill`.
TWELL_FIRING int swizzle_of(const Packed& p, int row) { return p.spill_index != nullptr ? 0 : (row & 7) << 3; }

// Calls take(column, raw value) for each value of a tile.
template <typename V, typename Take>
TWELL_FIRING void for_each(const Packed& p, int row, int number, Take take) {
  const Tile tile(p, row, number);
  if (tile.count <= p.slots) {
    for (int i = 1; i <= tile.count; ++i) {
      const uint32_t word = tile.word(p, i);
      take(static_cast<int>(word & 0xffff), V::of_slot(p, tile.at, i - 1, word));
    }
  } else {
    const int64_t first = tile.spilled(p);
    const int swizzle = swizzle_of(p, row);
    for (int i = 0; i < p.tile; ++i)
      if (const auto raw = V::of_spill(p, first + i); V::number(raw) != 0.f) take(i ^ swizzle, raw);
  }
}

// The value of a column in a tile; 0 where it did not fire.
template <typename V>
TWELL_FIRING typename V::Raw value_at(const Packed& p, int row, int number, int column) {
  const Tile tile(p, row, number);
  if (tile.count > p.slots) return V::of_spill(p, tile.spilled(p) + (column ^ swizzle_of(p, row)));
  for (int i = 1; i <= tile.count; ++i) {
    const uint32_t word = tile.word(p, i);
    if (static_cast<int>(word & 0xffff) == column) return V::of_slot(p, tile.at, i - 1, word);
    if (static_cast<int>(word & 0xffff) > column) break;  // slots are in ascending order
  }
  return 0;
}

// The bin of a value, of at least 0.
TWELL_FIRING int bin_of(float value) {
  const int shifted = (static_cast<int>(bits_of(value)) >> 22) - kFirstBits;
  return shifted < 0 ? 0 : shifted < kBins ? shifted : kBins - 1;
}

TWELL_FIRING Key top_key(float value, int row) {
  return static_cast<Key>(bits_of(value)) << 32 | ~static_cast<uint32_t>(row);
}
TWELL_FIRING Key sample_key(uint32_t draw, int row) {
  return kMostKey - (static_cast<Key>(draw) << 32 | static_cast<uint32_t>(row));
}

// splitmix64's state of a row in a layer.
TWELL_FIRING uint64_t state_of(const Rows& rows, const Layer& layer, int row) {
  return mixed(mixed(mixed(0, rows.sequence[row]), rows.position[row]), layer.number);
}

// Counts the firings of a tile of a row that is counted, and inserts those within the bounds, if the row is eligible.
template <typename V>
TWELL_FIRING void take_tile(const Packed& p, const Layer& layer, int row, int tile, bool eligible, uint64_t state) {
  const int k = layer.k;
  for_each<V>(p, row, tile, [&](int column, typename V::Raw raw) {
    const int64_t neuron = static_cast<int64_t>(tile) * p.tile + column;
    if (neuron >= layer.d_ff) return;  // of a row that is not finite
    const float value = V::number(raw);
    const int bin = bin_of(value);
    atomicAdd(&layer.fires[neuron * kBins + bin], 1);
    if (!eligible) return;
    if (value >= layer.value_bound[neuron]) insert(layer.keys + neuron * k, k, top_key(value, row));
    const uint32_t draw = mixed(state, neuron) >> 33;
    const int64_t band = neuron * kBands + bin / 2;
    if (static_cast<int>(draw) <= layer.draw_bound[band]) insert(layer.bands + band * k, k, sample_key(draw, row));
  });
}

// Copies the values first, first + step, … of the window of a neuron's key of a kind (0: top, 1: sample).
template <typename V>
TWELL_FIRING void copy_window(const Packed& p, const Rows& rows, const Layer& layer, int kind, int neuron, int slot,
                              int first, int step) {
  const int64_t place = (static_cast<int64_t>(kind) * layer.d_ff + neuron) * layer.k + slot;
  const Key key = layer.keys[place];
  const int row = static_cast<int>(kind == 0 ? ~static_cast<uint32_t>(key) : static_cast<uint32_t>(kMostKey - key));
  const int position = rows.position[row], length = rows.length[row];
  auto* window = static_cast<typename V::Raw*>(layer.windows) + place * kWindow;
  for (int i = first; i < kWindow; i += step) {
    const int at = position + i - kReach;
    const bool inside = at >= 0 && at < length;
    window[i] = inside ? value_at<V>(p, row + i - kReach, neuron / p.tile, neuron % p.tile) : V::kNaN;
  }
}

}  // namespace twell::selection
