// TwELL as a kernel left it, for launches that read it afterwards. No device code.
#pragma once

#include <cstdint>

namespace twell {

// A tile's words are in two arrays: the first `head_words` (the count, then slots) in heads, the others in tails.
struct Packed {
  const uint32_t* heads;   // [rows, tiles, head_words]
  const uint32_t* tails;   // [rows, tiles, slots + 1 - head_words]; null where there are none
  const int* spill_index;  // [rows, tiles], the tile's row in spill; null: spill is [rows, tiles, tile], of which only
                           // tiles past their slots are written, their columns in chunks of 8 at place chunk ^ row % 8
  const float* values;     // [rows, tiles, slots], of the slots in order; null where values are in the words
  const void* spill;       // [spilled, tile] of spill_bytes each
  int tiles, tile, slots, head_words, spill_bytes;
};

}  // namespace twell
