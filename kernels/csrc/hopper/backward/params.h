// One backward pass of the gated FFN on Hopper: its tensors, workspace, and launches. No torch.
//
// Rows keep the order and the blocks of 128 of the forward pass: row r of block b is at position 128 b + r. Neurons are
// sorted by how often they fire, and cut into groups of 64: a group's tokens are the positions that fire any of them.
#pragma once

#include "hopper/params.h"

namespace twell::hopper {

constexpr int kListNeurons = 64;  // neurons that share a list of tokens
constexpr int kChunk = 64;        // tokens of such a list in a step of the products
// values of a group's chunk: du, dg and h, each [64 neurons][64 tokens], swizzled
constexpr int kChunkValues = 3 * kListNeurons * kChunk;
constexpr int kKeepCtas = 4;      // CTAs for a block's rows
constexpr int kMostCtas = 144;    // most CTAs of a product whose work is divided evenly: the multiprocessors of a GH100
constexpr int kMostItems = 1024;  // most blocks of rows, or groups of neurons, among which that work is divided

constexpr int kKeptWhole = 0x7fffffff;  // in `used`: g and h are kept whole

// What the forward pass keeps for each non-zero, six bytes, in buckets by block and panel of the block's union.
// position: (panel % 4) << 13 | row of the block << 6 | column of the panel.
//
// Or, in the same memory, all of g and h: of a call whose first rows fire much, if there is room.
struct Kept {
  int rows;             // of the call
  int capacity;         // most values; those of further blocks are left out
  uint16_t* positions;  // [capacity]
  uint16_t* gates;      // [capacity]: gate values
  uint16_t* hidden;     // [capacity]: hidden values; the up value is their quotient, as exact as a rounded one
  int* starts;          // [blocks, panels + 1]: where each panel's bucket begins, and where the last one ends
  int* order;           // [blocks * 128]: the row at each position; `rows` or more past the last row
  uint16_t* unions;     // [blocks, panels * 64], as in Ffn
  int* union_sizes;     // [blocks]
  int* fires;           // [d_ff]: counted rows that fire each neuron. Zeros at first
  // [1]: values so far; more than `capacity` if any were left out; kKeptWhole. Zero at first. Null in a pass that is
  // repeated
  int* used;
  float* l1_parts;  // [blocks, kKeepCtas]: sums of |h| over counted rows
  // [2][rows, d_ff]: g and h of a call that is kept whole; in a plain FFN h alone. Null without room. Values lie in the
  // first one
  uint16_t* whole;
  int whole_from;  // firings of a row in the mean of the first rows, above which a call is kept whole

  // Whether a forward pass is repeated for its values and `starts` alone.
  __device__ __forceinline__ bool repeats() const { return used == nullptr; }
};

struct Backward {
  int rows, d_model, d_ff;
  int blocks;            // of 128 rows
  int panels;            // 64 columns each: the most that a block's union can have; and groups of 64 neurons
  bool float_weights;    // whether gradients of weights and biases are float32
  bool adds, adds_down;  // whether d_gate and d_up, and d_down, hold sums to which gradients are added

  const void* x;              // [rows, d_model]
  const void* dy;             // [rows, d_model]
  const void* w_gate;         // [d_ff, d_model]
  const void* w_up;           // [d_ff, d_model]
  const void* w_down;         // [d_ff, d_model]: by neuron
  const void *b_gate, *b_up;  // [d_ff] or null
  const uint8_t* finite;      // [rows]
  const uint8_t* counted;     // [rows] or null: all
  const float* l1_scale;      // [1]: the gradient of l1 by the number of counted rows
  Kept kept;

  uint16_t* rank_of;      // [d_ff]: a neuron's rank by how often it fires
  uint16_t* neuron_at;    // [d_ff]: the neuron of each rank
  uint16_t* union_ranks;  // [blocks, panels * 64]: the same of each neuron of a block's union
  uint32_t* marks;        // [panels, blocks * 4]: a group's tokens, a bit a position
  int* before;            // [panels, blocks * 4]: how many tokens precede each of those words
  // [panels, blocks * 128]: a group's tokens as rows, ascending by position; -1 up to the end of its last chunk
  int* tokens;
  int* token_counts;     // [panels]
  uint32_t* places;      // [capacity]: where du of each kept value is in `chunks`
  int* tasks;            // [blocks * panels, 2] of dh, as those of `up`
  uint32_t* task_count;  // [1]
  void* panels_of_rows;  // [blocks, 2, panels, 128, 64]: du, then dg over a block's union, swizzled
  void* chunks;          // [panels, blocks * 2, 3, 64, 64]: du, dg and h over a group's tokens, swizzled
  float* parts;          // [2 phases, kMostCtas, 2, 32, 256, 4]: sums of tiles that several CTAs share
  int* arrived;          // [2 phases, kMostCtas]: how many CTAs have written theirs

  void* dx;                      // [rows, d_model]
  void *d_gate, *d_up, *d_down;  // [d_ff, d_model], 16 bits or float32
  void *d_b_gate, *d_b_up;       // [d_ff] or null: nobody wants them
  void* d_b_down;                // [d_model] or null
};

// Each throws std::runtime_error if the driver refuses.
// first: the number of the first of these rows, where they are some of a call's
template <typename T> void launch_keep(const Ffn&, const Kept&, const uint8_t* counted, cudaStream_t, int first = 0);
template <typename T> void launch_restore(const Backward&, const Kept&, cudaStream_t);  // unless all is repeated
template <typename T> void launch_token_lists(const Backward&, cudaStream_t);
template <typename T> void launch_dh(const Backward&, cudaStream_t);
template <typename T> void launch_dx(const Backward&, cudaStream_t);
template <typename T> void launch_weights(const Backward&, cudaStream_t);
template <typename T> void launch_bias_sums(const Backward&, cudaStream_t);    // of gate and up, from the chunks
template <typename T> void launch_output_sums(const Backward&, cudaStream_t);  // d_b_down, from dy
// from: [rows, columns]; to: [columns, rows], rounded. For float to float, and to or from T.
template <typename From, typename To> void launch_transpose(const void* from, void* to, int rows, int columns,
                                                            cudaStream_t);

}  // namespace twell::hopper
