// What one warp of a CTA of `rows16_gate_up` does for the others, which multiply: it prefetches what comes next, and
// sees to what is handed on to `rows16_down`.
#pragma once

#include "hopper/few_rows/rows16.cuh"

namespace twell::hopper {

// Marks a group and its hidden state as not written, and returns once that is so.
template <int kTiles, int kNeurons>
__device__ __forceinline__ void clear_group(Rows16Group<kNeurons>& group, uint2* hidden, int lane) {
  constexpr int kUnits = sizeof(group) / sizeof(uint2), kHidden = kNeurons / 4 * 8 * kTiles,
                kEach = (kUnits + kHidden + 31) / 32;
  const auto unit = [&](int i) { return i < kUnits ? reinterpret_cast<uint2*>(&group) + i : hidden + (i - kUnits); };
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (const int i = lane + 32 * j; i < kUnits + kHidden)
      sm80::store_relaxed(unit(i), make_uint2(kUnwritten, kUnwritten));
  // A fence would wait for all that the multiprocessor has requested, five microseconds; what is read back is written.
  until_written([&] {
    bool cleared = true;
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (const int i = lane + 32 * j; i < kUnits + kHidden)
        cleared = !is_written(sm80::load_relaxed_8(unit(i), true)) && cleared;
    return cleared;
  });
}

// Prefetches the gate's weights into the L2 until the launches before have ended (`begun` completes), which is a hint,
// whatever they may still write; and lets `rows16_down` start, and the others hand on (`cleared` completes), once
// nothing that the launches before left looks handed on.
template <typename T, int kTiles, int kNeurons>
__device__ __forceinline__ void begin_rows16(uint64_t* begun, uint64_t* cleared, const Ffn& f,
                                             Rows16Group<kNeurons>& group, uint2* hidden, int first, int lane) {
  for (int row = first; row < min(first + kNeurons, f.d_ff) && !barrier_ready(begun, 0); ++row)
    if (lane == 0)
      prefetch_bulk(static_cast<const T*>(f.w_gate) + static_cast<int64_t>(row) * f.d_model, f.d_model * 2);
  barrier_wait(begun, 0);
  clear_group<kTiles>(group, hidden, lane);
  __syncwarp();
  if (lane == 0) barrier_arrive(cleared);
  let_next_launch();
}

// Hands on the list of the `count` neurons that fire, by their number in the FFN, and which rows' gate values are not
// finite.
template <int kNeurons>
__device__ __forceinline__ void hand_on(Rows16Group<kNeurons>& group, const uint16_t* list, int first, int count,
                                        uint32_t broken, int lane) {
  const bool all_weights = count > kRows16Gathered;
  if (lane == 31) sm80::store_relaxed(&group.count, (all_weights ? kNeurons : count) | broken << kBrokenGate);
  if (lane >= kNeurons / 4) return;
  const auto neuron = [&](int place) -> uint32_t {
    return place < count && !all_weights ? first + list[place] + 1 : 0;
  };
  sm80::store_relaxed(
      reinterpret_cast<uint2*>(group.list) + lane,
      make_uint2(neuron(4 * lane) | neuron(4 * lane + 1) << 16, neuron(4 * lane + 2) | neuron(4 * lane + 3) << 16));
}

// Prefetches into the L2 the down weights of the `count` neurons in `list`, and the gate weights of the group
// that its multiprocessor takes next.
template <typename T, int kNeurons>
__device__ __forceinline__ void prefetch_after_rows16_gate(const Ffn& f, const uint16_t* list, int first, int count,
                                                           int lane) {
  const auto prefetch = [&](const void* weights, int neuron) {
    prefetch_bulk(static_cast<const T*>(weights) + static_cast<int64_t>(neuron) * f.d_model, f.d_model * 2);
  };
  if (!(count > kRows16Gathered && f.leaves_dense))
    for (int i = lane; i < count; i += 32) prefetch(f.w_down, first + list[i]);
  const int next = first + f.next_group * kNeurons;
  if (f.next_group > 0)
    for (int neuron = next + lane; neuron < min(next + kNeurons, f.d_ff); neuron += 32) prefetch(f.w_gate, neuron);
}

}  // namespace twell::hopper
