// The launches of a compact backward pass, in their order. No torch.
#pragma once

#include "hopper/backward/compact/params.h"

namespace twell::hopper {

// How the arena is used, as hopper_backward.py has planned it.
struct CompactSizes {
  int64_t arena_bytes;
  int groups, blocks;  // of neurons and of rows, in each of the dense passes
  // whether sums of tiles of dx fit into d_gate and d_up, which are written after dx; else `sums` has them
  bool sums_in_gradients;
  bool sums_in_dx;    // whether those of the dense gradients of weights fit into dx, which is written after them
  bool at_once;       // whether the arena has room for all values as matrices, and is to be used so
  int64_t panels_at;  // the byte of the kept tensor from which on panels lie there, or 0: they are in the arena
};

// sums: two sides for tiles of dx, or null; plain: without an up branch, b.w_up being zeros.
// b.panels_of_rows: the arena
template <typename T>
void launch_compact(const Backward& b, int* panel_starts, uint32_t* chunk_starts, int* fits, void* sums, bool plain,
                    const CompactSizes& sizes, cudaStream_t on) {
  // of a side, in bytes: of tiles of dx; of tiles of the weights' gradients, in two phases
  constexpr int64_t kSide = int64_t{kMostCtas} * kPartBytesOfTile, kSideOfTwo = kSide * 3 / 2;
  CompactBackward c{};
  static_cast<Backward&>(c) = b;
  c.panel_starts = panel_starts, c.chunk_starts = chunk_starts, c.fits = fits, c.plain = plain;
  c.arena_bytes = sizes.arena_bytes;
  char* const arena = static_cast<char*>(b.panels_of_rows);
  const auto lies_at = [&](char* from) { c.panels_of_rows = c.chunks = from; };
  const auto share_sums = [&](void* first, void* second) {
    c.sides[0] = static_cast<float*>(first), c.sides[1] = static_cast<float*>(second);
  };
  const bool apart = sizes.panels_at > 0;
  char* const panels = apart ? reinterpret_cast<char*>(b.kept.whole) + sizes.panels_at : arena;
  if (apart)
    c.panel_bytes = (plain ? 1 : 2) * static_cast<int64_t>(b.rows) * b.d_ff * sizeof(*b.kept.whole) - sizes.panels_at;
  c.panels_of_rows = panels, c.chunks = arena;
  launch_compact_lists<T>(c, on);
  launch_compact_dh<T>(c, on);
  if (sizes.sums_in_gradients)
    share_sums(b.d_gate, b.d_up);
  else
    share_sums(sums, static_cast<char*>(sums) + kSide);
  launch_compact_dx<T>(c, on);
  const bool biased = b.d_b_gate != nullptr || b.d_b_up != nullptr;
  share_sums(panels, panels + kSideOfTwo);
  launch_compact_weights<T>(c, on);
  if (biased) launch_compact_bias_sums<T>(c, on);
  lies_at(arena);
  if (sizes.at_once) launch_at_once<T>(c, on);
  if (sizes.sums_in_dx)
    share_sums(b.dx, static_cast<char*>(b.dx) + kSideOfTwo);
  else
    lies_at(arena + 2 * kSideOfTwo);
  for (c.first = 0; c.first < b.panels; c.first += sizes.groups) {
    c.count = sizes.groups < b.panels - c.first ? sizes.groups : b.panels - c.first;
    launch_dense_values<T>(c, true, on);
    launch_dense_weights<T>(c, on);
    if (biased) launch_dense_bias_sums<T>(c, on);
  }
  share_sums(arena, arena + kSide);
  lies_at(arena + 2 * kSide);
  for (c.first = 0; c.first < b.blocks; c.first += sizes.blocks) {
    c.count = sizes.blocks < b.blocks - c.first ? sizes.blocks : b.blocks - c.first;
    launch_dense_values<T>(c, false, on);
    launch_dense_dx<T>(c, on);
  }
  if (b.d_b_down != nullptr) launch_output_sums<T>(b, on);
}

}  // namespace twell::hopper
