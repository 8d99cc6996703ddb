// Where the probes' counts go. No device code.
#pragma once

#include <stdint.h>

namespace twell {

struct Counts {
  const uint8_t* counted;       // [rows] or null: all
  const int* tokens;            // [rows]
  const int* sequences;         // [rows]
  int* nnz;                     // [rows]
  unsigned long long* pairs;    // [tile + 1] or null: (row, tile) pairs by their count
  unsigned long long* fullest;  // [tile + 1] or null: rows by the count of their fullest tile
  unsigned long long* fires;    // [d_ff] or null, and so are the following
  unsigned long long* value_sum;
  float* value_max;
  int* token_min;
  int* token_max;
  uint32_t* first_sequence;
};

}  // namespace twell
