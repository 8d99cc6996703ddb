// A backward pass in a workspace that is sized by what is kept, not by the worst case.
//
// Panels of du and dg, and chunks of du, dg and h, lie without gaps in one arena: panels from its beginning on, chunks
// up to its end. Where there is room to keep g and h whole, panels lie there instead, behind the values, if they fit.
// If they do not fit, or not all values were kept, the launches of the sparse products do nothing, and others compute
// all gradients densely from x and dy: groups of neurons one after the other for the weights' gradients, then blocks of
// rows one after the other for dx, each time through the same arena. Otherwise these do nothing. No sum is left between
// two of them, so that each gradient is a sum in float32, rounded once.
#pragma once

#include "hopper/backward/params.h"

namespace twell::hopper {

constexpr int kPartBytesOfTile = 128 * 256 * 4;  // a CTA's sums of a tile; of a tile of 64 rows half as many

struct CompactBackward : Backward {
  int64_t arena_bytes;     // of the arena, which `panels_of_rows` and `chunks` both point at
  int64_t panel_bytes;     // where panels lie in other memory, which `panels_of_rows` points at, its bytes; else 0
  int* panel_starts;       // [blocks + 1]: panels of the unions before each block's
  uint32_t* chunk_starts;  // [panels]: where each group's chunks begin, in values from the arena's first on
  // [1]: 1, all of it fits; 0, it does not, and passes are dense; -1, and it is dense at once; -2, from g and h as they
  // were kept. Written with the lists
  int* fits;
  float* sides[2];   // sums of tiles that several CTAs share: of those that begin a CTA's share, and that end it
  bool plain;        // without an up branch: up values are 1
  int first, count;  // of a dense launch: the groups of neurons, or the blocks of rows, that it is about
};

template <typename T> void launch_compact_lists(const CompactBackward&, cudaStream_t);
template <typename T> void launch_compact_dh(const CompactBackward&, cudaStream_t);
template <typename T> void launch_compact_dx(const CompactBackward&, cudaStream_t);
template <typename T> void launch_compact_weights(const CompactBackward&, cudaStream_t);
// [du | dg] of some blocks of rows, or du, dg and h of some groups of neurons (by_neuron), to the arena.
template <typename T> void launch_dense_values(const CompactBackward&, bool by_neuron, cudaStream_t);
template <typename T> void launch_dense_dx(const CompactBackward&, cudaStream_t);
template <typename T> void launch_dense_weights(const CompactBackward&, cudaStream_t);
// All gradients of a dense pass in at_once.cuh's way, if it can be.
template <typename T> void launch_at_once(const CompactBackward&, cudaStream_t);
// Gradients of the gate's and the up biases, from the chunks of a pass that fits, or of a dense launch.
template <typename T> void launch_compact_bias_sums(const CompactBackward&, cudaStream_t);
template <typename T> void launch_dense_bias_sums(const CompactBackward&, cudaStream_t);

}  // namespace twell::hopper
