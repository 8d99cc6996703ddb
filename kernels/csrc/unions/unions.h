// Unions of the neurons that fire in blocks of rows, from TwELL's words: what the launches read and write.
#pragma once

#include <cstdint>

#include "packed/packed.h"

namespace twell::unions {

// blocks: [n, wide], numbers of rows, or of blocks of the size before. marks: [n, tiles * tile / 32], a bit a neuron.
// histogram: [d_ff + 1], how many blocks have a union of that size; the launches add to it. Rows that are not finite
// may have firings from d_ff on, which count for nothing.
void launch_rows(const Packed& packed, int d_ff, const int* blocks, int n, int wide, uint32_t* marks,
                 unsigned long long* histogram, void* stream);
void launch_blocks(const uint32_t* smaller, const int* blocks, int n, int wide, int words, uint32_t* marks,
                   unsigned long long* histogram, void* stream);

}  // namespace twell::unions
