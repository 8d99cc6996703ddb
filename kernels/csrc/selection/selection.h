// The firings of a batch that may be kept as examples, from TwELL's words: what the launches read and write. The idea,
// and what keys, bins and draws are, is in kernels/backends/selection.py, which computes the same in torch.
#pragma once

#include <cstdint>

#include "packed/packed.h"

namespace twell::selection {

using Key = unsigned long long;  // 0: no firing

constexpr int kBins = 32, kBands = kBins / 2, kReach = 16, kWindow = 2 * kReach + 1;

struct Rows {
  const uint8_t* counted;   // [n]: whether firings are counted
  const uint8_t* eligible;  // [n]: whether they may be kept too
  const int* sequence;      // [n]
  const int* position;      // [n]: in the sequence, whose tokens lie in consecutive rows
  const int* length;        // [n]: of the sequence
  int n;
};

struct Layer {
  int number, d_ff, k;
  const float* value_bound;  // [d_ff]: the least value of a firing that may be kept
  const int* draw_bound;     // [d_ff, kBands]: the greatest draw
  Key* keys;                 // [2, d_ff, k]: of `top` and of `sample`, greatest first
  Key* bands;                // [d_ff, kBands, k]: the sample of each band, greatest first
  int* fires;                // [d_ff, kBins]: firings by value; added to
  void* windows;             // [2, d_ff, k, kWindow], of the type of the values: written where there is a key
};

// Keys, bands and fires are zeros at first. T: the type of the values.
template <typename T> void launch_scan(const Packed& packed, const Rows& rows, const Layer& layer, void* stream);
// The same, by tiles where words can be read 16 bytes at a time.
template <typename T> void launch_tile_scan(const Packed& packed, const Rows& rows, const Layer& layer, void* stream);
template <typename T> void launch_windows(const Packed& packed, const Rows& rows, const Layer& layer, void* stream);

}  // namespace twell::selection
