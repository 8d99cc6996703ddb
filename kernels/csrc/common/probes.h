// What the probes count: the neurons' sums, each declared once for all kernels, and where GPU kernels write. No device
// code.
#pragma once

#include <stdint.h>

namespace twell {

// What is summed up for each neuron, over the rows that fired it. Each line is a sum: SUM(name, type, empty, combine,
// firing).
//   empty    its value over no rows
//   combine  how two sums become one: add, least or greatest
//   firing   what one firing adds to it, in terms of `value`, `steps` (the value in steps of 2^-20), and the row's
//            `token` and `sequence`, both from 0 up
// From these lines follow the structs, the arguments of the ops, and all that the CPU kernel does with a sum. Only GPU
// kernels add by hand, as they gather in shared memory first: `Sums` in probes.cuh. `NeuronSums` in kernels/stats.py
// declares the same sums in the same order.
#define TWELL_NEURON_SUMS(SUM)                      \
  SUM(fires, unsigned long long, 0, add, 1)         \
  SUM(value_sum, unsigned long long, 0, add, steps) \
  SUM(value_max, float, 0, greatest, value)         \
  SUM(token_min, int32_t, INT32_MAX, least, token)  \
  SUM(token_max, int32_t, -1, greatest, token)      \
  SUM(first_sequence, uint32_t, UINT32_MAX, least, sequence) /* none is -1 in torch's int32, and the greatest here */

#define TWELL_ONE_MORE(...) +1
constexpr int kNeuronSums = 0 TWELL_NEURON_SUMS(TWELL_ONE_MORE);
#undef TWELL_ONE_MORE

// Where the probes of GPU kernels read and write.
struct Counts {
  const uint8_t* counted;       // [rows] or null: all
  const int* tokens;            // [rows]
  const int* sequences;         // [rows]
  int* nnz;                     // [rows]
  unsigned long long* pairs;    // [tile + 1] or null: (row, tile) pairs by their count
  unsigned long long* fullest;  // [tile + 1] or null: rows by the count of their fullest tile

  // [d_ff] or null
#define TWELL_POINTER(name, type, ...) type* name;
  TWELL_NEURON_SUMS(TWELL_POINTER)
#undef TWELL_POINTER
};

}  // namespace twell
