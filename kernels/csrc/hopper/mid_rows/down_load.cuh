// How the down product of the middle rows is divided, what a stage of it holds, and what the copy engine fetches of it.
#pragma once

#include <algorithm>
#include <array>

#include "hopper/mid_rows/tiles.cuh"

namespace twell::hopper {

// How many outputs a cluster has, and how many CTAs divide the union.
struct DownShape {
  int each, splits;
  bool operator==(const DownShape&) const = default;
};

constexpr DownShape kDownShapes[] = {{64, 3},  {64, 2},  {128, 2}, {160, 2}, {192, 2},
                                     {256, 2}, {128, 1}, {160, 1}, {192, 1}, {256, 1}};

// The shape with the fewest cycles, as in `choose_cta_tile`, for unions of every neuron. The time that does not depend
// on the union is that of 8 steps, and of 16 more where sums are added. at_once: how many clusters of each size run at
// once, with each CTA on a multiprocessor of its own. Clusters of four are not used: they would not use all
// multiprocessors, and two CTAs on one multiprocessor take twice as long.
inline DownShape choose_down_shape(const Ffn& f, const std::array<int, 4>& at_once) {
  DownShape best{};
  int64_t least = INT64_MAX;
  for (const DownShape& shape : kDownShapes) {
    if (shape.each % 64 > 0 && f.d_model % 32 > 0) continue;  // halves of lines
    if (shape.splits == 1 && f.d_ff > 16384) continue;        // the longer a union, the larger a CTA's list of it
    const int clusters = (f.d_model + shape.each - 1) / shape.each * f.blocks;
    const int waves = (clusters + at_once[shape.splits] - 1) / at_once[shape.splits];
    const int64_t step = step_cycles(kBlockRows + shape.each, 56, shape.each);
    const int64_t cost = waves * step * (f.d_ff / shape.splits + kTileK * (shape.splits > 1 ? 24 : 8));
    if (cost < least) best = shape, least = cost;
  }
  return best;
}

// The outputs of a task of `persistent_down`. Those with the fewest cycles are chosen; of two the wider ones, which
// read the hidden state less often.
constexpr int kPersistentOutputs[] = {256, 192, 128};
inline int choose_persistent_outputs(const Ffn& f, int processors) {
  const auto cycles = [&](int each) {
    const int64_t tasks = static_cast<int64_t>((f.d_model + each - 1) / each) * f.blocks;
    return (tasks + processors - 1) / processors * step_cycles(kBlockRows + each, 56, each);
  };
  return *std::min_element(std::begin(kPersistentOutputs), std::end(kPersistentOutputs),
                           [&](int a, int b) { return cycles(a) < cycles(b); });
}

constexpr int kEarlyStages = 8;  // most stages that `down` requests before it has a list

template <int kOut, int kSplits>
struct TiledDown {
  static constexpr int kSide = kTileK * 64 * 2;     // bytes of 64 neurons of 64 rows, or of 64 outputs
  static constexpr int kPanels = (kOut + 63) / 64;  // of outputs; the last one of 160 outputs is half full
  static constexpr int kStageBytes = (2 + kPanels) * kSide, kShare = (kOut / 8 + kSplits - 1) / kSplits * 8;
  // bytes of a row of outputs in shared memory, which puts rows into different banks
  static constexpr int kPitch = kShare * 2 + 16;
  static constexpr int kLeastBytes = std::max(kSplits > 1 ? kBlockRows * kShare * kSplits * 4 : 0, kBlockRows* kPitch);
  static constexpr int kLeastStages = (kLeastBytes + kStageBytes - 1) / kStageBytes;
  // Bytes of the sums that the other CTAs of the cluster send to one.
  __device__ static constexpr int sent_bytes(int rank) {
    const int left = kOut - rank * kShare, own = left < kShare ? left : kShare;
    return (kSplits - 1) * own / 8 * kConsumers * sizeof(float4);
  }
  // Bytes of the numbers of the most neurons that a CTA's share can have.
  static constexpr int list_bytes(int d_ff) { return ((d_ff + kSplits - 1) / kSplits + kTileK) * 2 + 127 & ~127; }
  static int stages(int d_ff) { return std::min(kTiledStages, (226 * 1024 - list_bytes(d_ff)) / kStageBytes); }
};

// What the copy engine fetches of 64 consecutive neurons: a block's hidden state and a cluster's outputs of W_d, in
// whole lines of 64, since shorter requests are no fewer. With 160 outputs, every other cluster's begin in the middle
// of a line: that half comes last there, and has a map of its own.
template <int kOut, int kSplits>
struct DownLoad {
  using Down = TiledDown<kOut, kSplits>;
  static constexpr bool kFullLines = kOut % 64 == 0;
  const CUtensorMap &w, &half, &h;
  int h0, d_model, out0 = blockIdx.y * kOut, line_offset = kFullLines ? 0 : out0 % 64;
  // Offset, from the cluster's first output in the row of W_d, of the output whose sum is the at-th of the cluster's.
  __device__ __forceinline__ int shift_of(int at) const {
    return kFullLines ? 0 : at + line_offset < kOut ? line_offset : line_offset - kOut;
  }
  __device__ __forceinline__ int output(int at) const { return out0 + at + shift_of(at); }
  __device__ __forceinline__ void request(unsigned char* stage, uint64_t* full, int neuron) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) tma_load_2d(stage + i * Down::kSide, &h, full, 64 * i, h0 + neuron);
#pragma unroll
    for (int i = 0; i < kOut / 64; ++i)
      if (has_line(i)) tma_load_2d(stage + (2 + i) * Down::kSide, &w, full, out0 + line_offset + 64 * i, neuron);
    if constexpr (!kFullLines)
      if (has_half())
        tma_load_3d(stage + (2 + kOut / 64) * Down::kSide, &half, full, 0, neuron, output(kOut / 64 * 64) / 32);
  }
  // Bytes that this fetches. What lies past the last output is left out: the copy engine takes longer to write zeros
  // than to copy, and sums of what a stage holds there are not used.
  __device__ __forceinline__ int bytes() const {
    int boxes = 2 + (!kFullLines && has_half());
#pragma unroll
    for (int i = 0; i < kOut / 64; ++i) boxes += has_line(i);
    return boxes * Down::kSide;
  }

 private:
  // Whether there are outputs in the i-th whole line, and in the half of one.
  __device__ __forceinline__ bool has_line(int i) const { return out0 + line_offset + 64 * i < d_model; }
  __device__ __forceinline__ bool has_half() const { return output(kOut / 64 * 64) < d_model; }
};

}  // namespace twell::hopper
