// Unions of the neurons that fire in blocks of rows, from TwELL's words: what the launches read and write.
#pragma once

#include <cstdint>

namespace twell::unions {

// A tile's words are in two arrays: the first `head_words` (the count, then slots) in heads, the others in tails.
struct Packed {
  const uint32_t* heads;   // [rows, tiles, head_words]
  const uint32_t* tails;   // [rows, tiles, slots + 1 - head_words]; null where there are none
  const int* spill_index;  // [rows, tiles], the tile's row in spill; null: spill is [rows, tiles, tile], of which only
                           // tiles past their slots are written, their columns in chunks of 8 at place chunk ^ row % 8
  const void* spill;       // [spilled, tile] of spill_bytes each
  int tiles, tile, slots, head_words, spill_bytes;
};

// blocks: [n, wide], numbers of rows, or of blocks of the size before. marks: [n, tiles * tile / 32], a bit a neuron.
// histogram: [d_ff + 1], how many blocks have a union of that size; the launches add to it.
void launch_rows(const Packed& packed, const int* blocks, int n, int wide, uint32_t* marks, unsigned long long* histogram,
                 void* stream);
void launch_blocks(const uint32_t* smaller, const int* blocks, int n, int wide, int words, uint32_t* marks,
                   unsigned long long* histogram, void* stream);

}  // namespace twell::unions
