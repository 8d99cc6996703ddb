// One call of the FFN on Hopper: its sizes, its tensors, its workspace, and the launches that make it up. No torch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/probes.h"

namespace twell::hopper {

constexpr int kBlockRows = 128;   // rows that share a union
constexpr int kWindow = 1024;     // rows among which blocks choose theirs
constexpr int kPanelColumns = 64; // columns of a hidden panel: [128 rows][64] values, 16 KB, 128-byte swizzled
constexpr int kRows16Max = 16, kRows64Max = 64;  // up to so many rows `rows16` and `rows64` take calls that have no plan
constexpr int kGroupNeurons = 48;   // to a CTA of either
constexpr int kTile = 256, kWords = 32, kSlots = kWords - 1;  // TwELL at compression 8
constexpr int kHead = 8, kTail = kWords - kHead;              // its words, split where most rows end
constexpr int kMaskWords = kTile / 32;  // of what a tile fires, a bit a neuron
constexpr int kParts = 144, kPartWarps = 8;  // sums that `down` can leave for others at once, of so many warps each
constexpr uint32_t kDenseTile = 1u << 16, kCount = kDenseTile - 1;    // of a first word: the tile lies dense in `spill`; the count
constexpr int kDenseTileBlocks = 64;  // up to so many blocks the gate's kernel continues with up products, if it can
constexpr uint32_t kNonfiniteGate = 1u << 31, kNonfiniteUp = 1u << 30;  // of a row's sum: gate values, and up products that are not finite

// Whether so many of d_ff neurons, or of a tile's, are so nearly all that products over all of them take no longer.
__host__ __device__ constexpr bool nearly_all(int some, int all) { return 20ll * some >= 17ll * all; }

struct Ffn {
  bool planned;  // whether rows have an order and a plan
  int rows, d_model, d_ff;
  int tiles;   // of 256 columns, the last one partial
  int panels;  // of 64 columns, likewise: as many as a block's hidden state can have
  int blocks;  // of 128 rows

  const void* x;       // [rows, d_model]
  const void* w_gate;  // [d_ff, d_model]
  const void* w_up;    // [d_ff, d_model], null in a plain FFN
  const void* w_down;  // [d_ff, d_model]: by neuron
  const void* b_gate;  // [d_ff] or null
  const void* b_up;    // [d_ff] or null
  const void* b_down;  // [d_model] or null

  uint32_t* heads;       // [rows, tiles, 8]: the true count, then slots of index | value << 16; past the count, anything. A tile
                         // past its slots, or with kDenseTile beside its count, lies in `spill`
  uint32_t* tails;       // [rows, tiles, 24]: further slots, touched 8 at a time where they are used
  void* spill;           // [rows, tiles, 32, 8]: such tiles, dense, chunk c of row r at c ^ (r % 8); others untouched by the gate
  uint32_t* masks;       // [rows, tiles, 8]: what fires, a bit a neuron
  uint32_t* fired;       // [blocks, tiles, 8]: what 128 rows that follow each other fire together, likewise
  uint32_t* row_sums;    // [rows + 1]: how many neurons a row fires, with kNonfiniteGate where its gate values are not, and kNonfiniteUp where
                         // up products that the gate's kernel made are not; then the number of `tasks`. From zeros on
  int* dense_tiles;            // [3 * windows + 2 * pairs of blocks * tiles], behind them: what lies dense in `spill`, as dense_tiles.cuh has it.
                         // From zeros on; null in a plain FFN, and of more than kDenseTileBlocks
  bool continues_with_up;          // whether the gate's kernel may go on with their up products
  int* order;            // [windows * 1024]: the rows of each block, by nnz in a window; from `rows` on in their place
  uint16_t* unions;      // [blocks, panels * 64]: the block's neurons, ascending, and neuron 0 in the rest of the last 64 of them, or of
                         // the first 64 where it has none
  int* union_sizes;      // [blocks]; d_ff: every neuron, and the block runs dense; -d_ff: and its gate values lie in `spill`
  void* hidden;          // [blocks, panels, 128, 64]: gate values over the union, then the hidden state, swizzled
  int* tasks;            // [blocks * panels, 2] of the up product: a block, and 32 * first panel + 16 * (it runs dense) +
                         // 8 * (its rows are consecutive) + panels
  float* parts;          // [kParts, 32, 256, 4]: the sums so far of a task of `down` that a CTA does not finish, by thread
  int* part_ready;       // [kParts, kPartWarps]: 1 once a warp's part is there
  void* y;               // [rows, d_model]
  uint8_t* finite;       // [rows]: 1, or 0 where a row is not; written by the plan, and again by `up`
  int* nnz;              // [rows] or null: how many neurons a row fires; none where it is not finite. Written alike
};

// Each throws std::runtime_error where the driver refuses.
template <typename T> void launch_gate(const Ffn&, cudaStream_t);
template <typename T> void launch_plan(const Ffn&, bool first, cudaStream_t);  // of this gate product's words
template <typename T> void launch_up(const Ffn&, cudaStream_t);
template <typename T> void launch_down(const Ffn&, cudaStream_t);
// Without a plan, three paths. dense: the gate values are wanted in `spill`.
template <typename T> void launch_rows16_gate_up(const Ffn&, bool dense, cudaStream_t);  // up to kRows16Max
template <typename T> void launch_rows16_down(const Ffn&, int* nnz, cudaStream_t);
template <typename T> void launch_rows64_gate_up(const Ffn&, bool dense, cudaStream_t);  // up to kRows64Max
template <typename T> void launch_rows64_down(const Ffn&, int* nnz, cudaStream_t);
template <typename T> void launch_tiled_gate_up(const Ffn&, bool dense, cudaStream_t);
template <typename T> void launch_tiled_down(const Ffn&, int* nnz, cudaStream_t);
template <typename T> void launch_pack_words(const Ffn&, cudaStream_t);  // the words of any of them, where they are wanted
template <typename T> void launch_counts(const Ffn&, const Counts&, cudaStream_t);

}  // namespace twell::hopper
