// One launch reads every firing once; another shares out the sample among the bands of values, and copies the windows.
#pragma once

#include "common/convert.cuh"
#include "selection/selection.h"

namespace twell::selection {

__device__ __forceinline__ Key glance(const Key& key) { return *const_cast<volatile const Key*>(&key); }
__device__ __forceinline__ uint32_t bits_of(float value) { return __float_as_uint(value); }

}  // namespace twell::selection

#include "selection/firing.h"

namespace twell::selection {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Values of 16 bits, in the words.
template <typename T>
struct Value {
  using Raw = uint16_t;
  static constexpr Raw kNaN = 0x7fff;  // in either type
  static __device__ __forceinline__ Raw of_slot(const Packed&, int64_t, int, uint32_t word) { return word >> 16; }
  static __device__ __forceinline__ Raw of_spill(const Packed& p, int64_t at) {
    return static_cast<const Raw*>(p.spill)[at];
  }
  static __device__ __forceinline__ float number(Raw raw) { return half_of<T>(raw, 0); }
};

// A warp a row, a lane a tile.
template <typename T>
__global__ void __launch_bounds__(kThreads) scan(const Packed p, const Rows rows, const Layer layer) {
  for (int row = blockIdx.x * kWarps + threadIdx.x / 32; row < rows.n; row += gridDim.x * kWarps) {
    if (!rows.counted[row]) continue;
    const bool eligible = rows.eligible[row];
    const uint64_t state = state_of(rows, layer, row);
    for (int tile = threadIdx.x % 32; tile < p.tiles; tile += 32)
      take_tile<Value<T>>(p, layer, row, tile, eligible, state);
  }
}

// Writes a neuron's sample of the batch: the first key of every band, greater values first, then the second, and so on.
__device__ __forceinline__ void share_out(const Layer& layer, int neuron, int lane) {
  const int k = layer.k;
  const Key* bands = layer.bands + static_cast<int64_t>(neuron) * kBands * k;
  Key* sample = layer.keys + (static_cast<int64_t>(layer.d_ff) + neuron) * k;
  for (int rank = 0, before = 0; rank < k && before < k; ++rank) {
    const Key key = lane < kBands ? bands[lane * k + rank] : 0;
    const uint32_t there = __ballot_sync(~0u, key != 0);
    if (there == 0) break;
    const int place = before + __popc(there >> lane >> 1);
    if (key != 0 && place < k) sample[place] = key;
    before += __popc(there);
  }
  __syncwarp();
}

// A warp a neuron.
template <typename T>
__global__ void __launch_bounds__(kThreads) copy_windows(const Packed p, const Rows rows, const Layer layer) {
  const int neuron = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (neuron >= layer.d_ff) return;
  share_out(layer, neuron, lane);
  for (int kind = 0; kind < 2; ++kind) {
    const Key* keys = layer.keys + (static_cast<int64_t>(kind) * layer.d_ff + neuron) * layer.k;
    for (int slot = 0; slot < layer.k && keys[slot] != 0; ++slot)
      copy_window<Value<T>>(p, rows, layer, kind, neuron, slot, lane, 32);
  }
}

}  // namespace twell::selection
