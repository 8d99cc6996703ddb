// The launches as a torch op. The host checks are in kernels/backends/selection_gpu.py.
#include "packed/tensors.h"
#include "selection/selection.h"

namespace {

using namespace twell;

void select_layer(const Tensor& heads, const Maybe& tails, const Maybe& spill_index, const Tensor& spill,
                  const Tensor& counted, const Tensor& eligible, const Tensor& sequence, const Tensor& position,
                  const Tensor& length, int64_t number, const Tensor& value_bound, const Tensor& draw_bound,
                  const Tensor& keys, const Tensor& bands, const Tensor& fires, const Tensor& windows, int64_t tile,
                  int64_t slots, bool by_tiles) {
  const DeviceGuard guard(heads.get_device_index());
  const Packed packed = packed_of(heads, tails, spill_index, spill, tile, slots);
  selection::Rows rows{};
  rows.counted = as<uint8_t>(counted), rows.eligible = as<uint8_t>(eligible), rows.sequence = as<int>(sequence);
  rows.position = as<int>(position), rows.length = as<int>(length), rows.n = heads.size(0);
  selection::Layer layer{};
  layer.number = number, layer.d_ff = keys.size(1), layer.k = keys.size(2);
  layer.value_bound = as<float>(value_bound), layer.draw_bound = as<int>(draw_bound);
  layer.keys = as<selection::Key>(keys), layer.bands = as<selection::Key>(bands), layer.fires = as<int>(fires);
  layer.windows = address(windows);
  by_type(spill, [&]<typename T>() {
    (by_tiles ? selection::launch_tile_scan<T> : selection::launch_scan<T>)(packed, rows, layer, stream_of(heads));
    selection::launch_windows<T>(packed, rows, layer, stream_of(heads));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def(
      "select_firings(Tensor heads, Tensor? tails, Tensor? spill_index, Tensor spill, Tensor counted, Tensor eligible, "
      "Tensor sequence, Tensor position, Tensor length, int number, Tensor value_bound, Tensor draw_bound, Tensor(a!) "
      "keys, "
      "Tensor(b!) bands, Tensor(c!) fires, Tensor(d!) windows, int tile, int slots, bool by_tiles) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CUDA, m) { m.impl("select_firings", TORCH_BOX(&select_layer)); }
