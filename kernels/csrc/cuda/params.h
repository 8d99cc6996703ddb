// One call of the FFN on any NVIDIA GPU from sm_80 on: its sizes, tensors and workspace, and its launches. No torch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/probes.h"

namespace twell::cuda {

struct Ffn {
  int rows, d_model, d_ff;
  int words;  // of a row's mask, 32 columns each
  int pitch;  // columns between rows of `values`
  int block;  // consecutive rows that share a union, 16 or 64: the height of the tiles of `up` and `down`
  int blocks;
  bool relu2, up_relu;  // ReLU squared; a ReLU on the up branch too

  const void* x;       // [rows, d_model]
  const void* w_gate;  // [d_ff, d_model]
  const void* w_up;    // [d_ff, d_model], null in a plain FFN
  const void* w_down;  // [d_ff, d_model]: by neuron
  const void* b_gate;  // [d_ff] or null
  const void* b_up;    // [d_ff] or null
  const void* b_down;  // [d_model] or null

  uint32_t* masks;  // [rows, words]: a bit a neuron that fired
  void* values;     // [rows, pitch]: every eight columns of which one fired; other values are undefined
  int* lists;       // [blocks, d_ff]: the block's neurons, ascending
  int* sizes;       // [blocks]: how many
  // [blocks * block, d_ff]: values over the union, then the hidden state; zeros up to a multiple of eight
  void* hidden;
  // [1 + blocks * tiles, 2] of the up product: the number of tasks; then a block and a tile of its union each
  int* tasks;
  void* y;          // [rows, d_model]
  uint8_t* finite;  // [rows], ones from the caller, zeroed where a row is not
  int* used;        // [rows] or null, zeros from the caller: with up_relu, how many products are not zero
};

// TwELL of any layout; a tile past its slots is completed in `values`.
struct Packed {
  int tile, words, tiles;  // columns; words a tile; tiles a row
  uint32_t* out;           // [rows, tiles, words]
  int* spill_index;        // [rows, tiles]: the tile's row in `values` as [rows * tiles, tile]; -1 if it fits its slots
};

// Each throws std::runtime_error if the driver refuses.
template <typename T> void launch_gate(const Ffn&, cudaStream_t);
void launch_plan(const Ffn&, cudaStream_t);
template <typename T> void launch_up(const Ffn&, cudaStream_t);
template <typename T> void launch_down(const Ffn&, cudaStream_t);
template <typename T> void launch_counts(const Ffn&, const Counts&, int tile, cudaStream_t);
void launch_pack(const Ffn&, const Packed&, cudaStream_t);

}  // namespace twell::cuda
