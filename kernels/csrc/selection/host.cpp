// The same on a CPU, as a torch op: rows are shared out among threads, then neurons.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <limits>
#include <optional>

#include "selection/selection.h"

namespace twell::selection {

inline Key glance(const Key& key) { return __atomic_load_n(&key, __ATOMIC_RELAXED); }
inline void atomicAdd(int* to, int number) { __atomic_fetch_add(to, number, __ATOMIC_RELAXED); }
inline Key atomicMax(Key* to, Key key) {
  Key before = glance(*to);
  while (before < key && !__atomic_compare_exchange_n(to, &before, key, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

}  // namespace twell::selection

#include "selection/firing.h"

namespace {

using namespace twell;
using selection::Key, selection::Layer, selection::kBands;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

struct Float {
  using Raw = float;
  static constexpr Raw kNaN = std::numeric_limits<float>::quiet_NaN();
  static Raw of_slot(const Packed& p, int64_t at, int slot, uint32_t) { return p.values[at * p.slots + slot]; }
  static Raw of_spill(const Packed& p, int64_t at) { return static_cast<const Raw*>(p.spill)[at]; }
  static float number(Raw raw) { return raw; }
};

struct Bfloat16 {
  using Raw = uint16_t;
  static constexpr Raw kNaN = 0x7fff;
  static Raw of_slot(const Packed&, int64_t, int, uint32_t word) { return word >> 16; }
  static Raw of_spill(const Packed& p, int64_t at) { return static_cast<const Raw*>(p.spill)[at]; }
  static float number(Raw raw) {
    const uint32_t bits = static_cast<uint32_t>(raw) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};

// Writes a neuron's sample of the batch: the first key of every band, greater values first, then the second, and so on.
void share_out(const Layer& layer, int64_t neuron) {
  const Key* bands = layer.bands + neuron * kBands * layer.k;
  Key* sample = layer.keys + (layer.d_ff + neuron) * layer.k;
  for (int rank = 0, place = 0; rank < layer.k; ++rank)
    for (int band = kBands - 1; band >= 0 && place < layer.k; --band)
      if (const Key key = bands[band * layer.k + rank]) sample[place++] = key;
}

template <typename V>
void run(const Packed& packed, const selection::Rows& rows, const Layer& layer) {
  torch::stable::parallel_for(0, rows.n, 256, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      if (!rows.counted[row]) continue;
      const uint64_t state = selection::state_of(rows, layer, row);
      for (int tile = 0; tile < packed.tiles; ++tile)
        selection::take_tile<V>(packed, layer, row, tile, rows.eligible[row], state);
    }
  });
  torch::stable::parallel_for(0, layer.d_ff, 64, [&](int64_t neuron, int64_t end) {
    for (; neuron < end; ++neuron) {
      share_out(layer, neuron);
      for (int kind = 0; kind < 2; ++kind) {
        const Key* keys = layer.keys + (kind * static_cast<int64_t>(layer.d_ff) + neuron) * layer.k;
        for (int slot = 0; slot < layer.k && keys[slot] != 0; ++slot)
          selection::copy_window<V>(packed, rows, layer, kind, neuron, slot, 0, 1);
      }
    }
  });
}

template <typename T>
T* as(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

void select_layer(const Tensor& words, const Maybe& values, const Tensor& spill_index, const Tensor& spill,
                  const Tensor& counted, const Tensor& eligible, const Tensor& sequence, const Tensor& position,
                  const Tensor& length, int64_t number, const Tensor& value_bound, const Tensor& draw_bound,
                  const Tensor& keys, const Tensor& bands, const Tensor& fires, const Tensor& windows, int64_t tile,
                  int64_t slots) {
  Packed packed{};
  packed.heads = as<uint32_t>(words), packed.head_words = words.size(2), packed.spill_index = as<int>(spill_index);
  packed.values = values ? as<float>(*values) : nullptr, packed.spill = as<void>(spill);
  packed.tiles = words.size(1), packed.tile = tile, packed.slots = slots;
  selection::Rows rows{};
  rows.counted = as<uint8_t>(counted), rows.eligible = as<uint8_t>(eligible), rows.sequence = as<int>(sequence);
  rows.position = as<int>(position), rows.length = as<int>(length), rows.n = words.size(0);
  Layer layer{};
  layer.number = number, layer.d_ff = keys.size(1), layer.k = keys.size(2);
  layer.value_bound = as<float>(value_bound), layer.draw_bound = as<int>(draw_bound);
  layer.keys = as<Key>(keys), layer.bands = as<Key>(bands), layer.fires = as<int>(fires);
  layer.windows = as<void>(windows);
  values ? run<Float>(packed, rows, layer) : run<Bfloat16>(packed, rows, layer);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def(
      "select_firings_cpu(Tensor words, Tensor? values, Tensor spill_index, Tensor spill, Tensor counted, "
      "Tensor eligible, Tensor sequence, Tensor position, Tensor length, int number, Tensor value_bound, "
      "Tensor draw_bound, Tensor(a!) keys, Tensor(b!) bands, Tensor(c!) fires, Tensor(d!) windows, int tile, int "
      "slots) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CPU, m) { m.impl("select_firings_cpu", TORCH_BOX(&select_layer)); }
