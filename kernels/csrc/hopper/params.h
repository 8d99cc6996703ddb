// One call of the FFN on Hopper: its sizes, tensors and workspace, and its launches. No torch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/probes.h"

namespace twell::hopper {

constexpr int kBlockRows = 128;    // rows that share a union
constexpr int kWindow = 1024;      // consecutive rows from which blocks choose theirs
constexpr int kPanelColumns = 64;  // columns of a hidden panel: [128 rows][64] values, 16 KB, 128-byte swizzled
constexpr int kRows16Max = 16, kRows64Max = 64;  // most rows that `rows16` and `rows64` take, in calls without a plan
constexpr int kGroupNeurons = 48, kWideGroup = 64;  // neurons of one of their CTAs; of one of `rows16` in wide models
constexpr int kTile = 256, kWords = 32, kSlots = kWords - 1;  // TwELL at compression 8
constexpr int kHead = 8, kTail = kWords - kHead;  // its words, in two arrays: most rows use no more than a head
constexpr int kMaskWords = kTile / 32;            // bits of what a tile fires, a bit a neuron
// most sums that `down` can leave for other CTAs at once, of this many warps each
constexpr int kParts = 144, kPartWarps = 8;
// in a first word: the flag that the tile is dense in `spill`; the bits of the count
constexpr uint32_t kDenseTile = 1u << 16, kCount = kDenseTile - 1;
constexpr int kDenseTileBlocks = 64;  // up to this many blocks, the gate's kernel continues with up products, if it can
// flags in a row's sum: its gate values, or its up products, are not finite
constexpr uint32_t kNonfiniteGate = 1u << 31, kNonfiniteUp = 1u << 30;

// Whether this many of d_ff neurons, or of a tile's, are so nearly all that products over all of them take no longer.
__host__ __device__ constexpr bool nearly_all(int some, int all) { return 20ll * some >= 17ll * all; }

struct Ffn {
  bool planned;  // whether rows have an order and a plan
  int rows, d_model, d_ff;
  int tiles;   // 256 columns each, the last one partial
  int panels;  // 64 columns each, likewise: the most that a block's hidden state can have
  int blocks;  // 128 rows each

  const void* x;       // [rows, d_model]
  const void* w_gate;  // [d_ff, d_model]
  const void* w_up;    // [d_ff, d_model], null in a plain FFN
  const void* w_down;  // [d_ff, d_model]: by neuron
  const void* b_gate;  // [d_ff] or null
  const void* b_up;    // [d_ff] or null
  const void* b_down;  // [d_model] or null

  // [rows, tiles, 8]: the true count, then slots of index | value << 16; words past the count are undefined. A tile
  // past its slots, or with kDenseTile beside its count, is in `spill`
  uint32_t* heads;
  uint32_t* tails;  // [rows, tiles, 24]: further slots, written 8 at a time as they are used
  // [rows, tiles, 32, 8]: such tiles, dense, with chunk c of row r at c ^ (r % 8), and those that are left as words
  // too; the gate does not write other tiles
  void* spill;
  uint32_t* masks;  // [rows, tiles, 8]: what fires, a bit a neuron; without a plan, counts of rows by groups
  uint32_t* fired;  // [blocks, tiles, 8]: likewise for any of 128 consecutive rows
  // [rows + 1]: how many neurons a row fires, with kNonfiniteGate if its gate values are not finite, and kNonfiniteUp
  // if up products that the gate's kernel made are not; then the number of `tasks`. Zeros at first
  uint32_t* row_sums;
  // [3 * windows + 2 * pairs of blocks * tiles], after row_sums: which tiles are dense in `spill`, as in
  // dense_tiles.cuh. Zeros at first; null in a plain FFN, and with more than kDenseTileBlocks
  int* dense_tiles;
  // whether the gate's kernel may continue with their up products. `up` makes those again that lie in blocks which then
  // do not run dense, so it may not where used products are counted
  bool continues_with_up;
  int* order;  // [windows * 1024]: the rows of each block, by nnz within a window; entries from `rows` on stay in place
  // [blocks, panels * 64]: the block's neurons, ascending; neuron 0 fills the last 64 of them, or the first 64 of an
  // empty union
  uint16_t* unions;
  // [blocks]; d_ff: every neuron, and the block runs dense; -d_ff: and its gate values are in `spill`
  int* union_sizes;
  void* hidden;  // [blocks, panels, 128, 64]: gate values over the union, then the hidden state, swizzled
  // [blocks * panels, 2] of the up product: a block, and 32 * first panel + 16 * (it runs dense) + 8 * (its rows are
  // consecutive) + panels
  int* tasks;
  float* parts;       // [kParts, 32, 256, 4]: the sums so far of a task of `down` that a CTA does not finish, by thread
  int* part_ready;    // [kParts, kPartWarps]: 1 once a warp's part is written
  void* y;            // [rows, d_model]
  const void* added;  // [rows, d_model] or null: is added to y once that is rounded.
  uint8_t* finite;    // [rows]: 1, or 0 for a row that is not finite; written by the plan, and again by `up`
  int* nnz;  // [rows] or null: how many neurons a row fires; 0 for a row that is not finite. Written with `finite`

  // [1] or null: of a backward pass that may repeat the forward pass, how many values that one had to keep. The
  // launches do nothing where they were at most `capacity`
  const int* used;
  int capacity;

  // [rows] or null, zeros from the caller: with a ReLU on the up branch too, how many products are not zero
  int* nnz_used;

  // of `rows16`, as dispatch.h chooses: whether groups are wide; whether down weights of dense groups are left alone;
  // how many groups further on the one is whose gate weights are prefetched, or 0
  bool wide_groups, leaves_dense;
  int next_group;
};

// Whether a launch would repeat a forward pass of which everything was kept. Only the kernels of training ask.
__device__ __forceinline__ bool is_needless(const Ffn& f) {
#ifdef TWELL_TRAINING
  return f.used != nullptr && *f.used <= f.capacity;
#else
  return false;
#endif
}

// Each throws std::runtime_error if the driver refuses.
template <typename T> void launch_gate(const Ffn&, cudaStream_t);
template <typename T> void launch_plan(const Ffn&, bool first, cudaStream_t);  // of this gate product's words
template <typename T> void launch_up(const Ffn&, cudaStream_t);
template <typename T> void launch_down(const Ffn&, cudaStream_t);
// Without a plan there are three paths. dense: whether the gate values are needed in `spill`.
template <typename T> void launch_rows16_gate_up(const Ffn&, bool dense, cudaStream_t);  // up to kRows16Max
template <typename T> void launch_rows16_down(const Ffn&, int* nnz, cudaStream_t);
template <typename T> void launch_rows64_gate_up(const Ffn&, bool dense, cudaStream_t);  // up to kRows64Max
template <typename T> void launch_rows64_down(const Ffn&, int* nnz, cudaStream_t);
template <typename T> void launch_tiled_gate_up(const Ffn&, bool dense, cudaStream_t);
template <typename T> void launch_tiled_down(const Ffn&, int* nnz, cudaStream_t);
// the words of any of them, if they are requested
template <typename T> void launch_pack_words(const Ffn&, cudaStream_t);
template <typename T> void launch_counts(const Ffn&, const Counts&, cudaStream_t);
template <typename T> void launch_clear_used(const Ffn&, cudaStream_t);  // nnz_used of rows that are not finite; last

}  // namespace twell::hopper
