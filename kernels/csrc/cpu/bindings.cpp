// The op `twell::cpu_ffn`: tensors in, tensors out.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "cpu/run.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

std::vector<float> widened(const MaybeTensor& bias, int64_t count) {
  std::vector<float> wide(ceil_div(count, kPanel) * kPanel + kPanel, 0.f);
  if (!bias) return wide;
  if (bias->scalar_type() == ScalarType::Float) {
    std::copy_n(bias->const_data_ptr<float>(), count, wide.begin());
  } else {
    const auto* narrow = static_cast<const uint16_t*>(bias->const_data_ptr());
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = uint32_t(narrow[i]) << 16;
      std::copy_n(reinterpret_cast<const char*>(&bits), 4, reinterpret_cast<char*>(&wide[i]));
    }
  }
  return wide;
}

// The threads' sums as one: fires, value_sum, value_max, token_min, token_max, first_sequence, each [d_ff].
std::vector<Tensor> joined(const Threads& threads, const Tensor& like) {
  const int64_t d_ff = threads.neurons;
  std::vector<Tensor> out;
  for (ScalarType type : {ScalarType::Long, ScalarType::Long, ScalarType::Float, ScalarType::Int, ScalarType::Int, ScalarType::Int})
    out.push_back(torch::stable::new_empty(like, {d_ff}, type));
  auto* fires = out[0].mutable_data_ptr<int64_t>();
  auto* value_sum = out[1].mutable_data_ptr<int64_t>();
  auto* value_max = out[2].mutable_data_ptr<float>();
  auto* token_min = out[3].mutable_data_ptr<int32_t>();
  auto* token_max = out[4].mutable_data_ptr<int32_t>();
  auto* first_sequence = out[5].mutable_data_ptr<int32_t>();
  for (int64_t j = 0; j < d_ff; ++j) {
    const Neuron all = threads.sum(j);
    fires[j] = all.fires;
    value_sum[j] = all.value_sum;
    value_max[j] = all.value_max;
    token_min[j] = all.token_min;
    token_max[j] = all.fires ? all.token_max : -1;
    first_sequence[j] = all.fires ? all.first_sequence : -1;
  }
  return out;
}

// What TwELL keeps of tiles past their slots: their places in `spill`, int32 [n, tiles], and [spilled, tile] of x's type.
std::pair<Tensor, Tensor> spilled(const Ffn& ffn, const Tensor& like, int64_t tiles) {
  Tensor places = torch::stable::new_empty(like, {ffn.n, tiles}, ScalarType::Int);
  int32_t* place = places.mutable_data_ptr<int32_t>();
  int32_t count = 0;
  for (int64_t at = 0; at < ffn.n * tiles; ++at) place[at] = ffn.tiles[at] > ffn.words - 1 ? count++ : -1;
  Tensor spill = torch::stable::new_empty(like, {count, ffn.tile});
  void* out = spill.mutable_data_ptr();
  for (int64_t at = 0; at < ffn.n * tiles; ++at) {
    if (place[at] < 0) continue;
    const float* from = ffn.spill + at * ffn.tile;
    const int64_t to = place[at] * ffn.tile;
    if (ffn.narrow)
      std::transform(from, from + ffn.tile, static_cast<uint16_t*>(out) + to, narrowed);
    else
      std::copy_n(from, ffn.tile, static_cast<float*>(out) + to);
  }
  return {places, spill};
}

// Arguments as kernels/cpu.py passes them, checked in Python. w_down: [d_ff, d_model], a neuron a row.
// counts, neurons: the probes; tile, words: of the tiles to count in and to pack into, 0 for none; level: as pick_level.
// Returns y and finite, and of the following what was asked for: nnz; nnz_used; tile counts [n, tiles]; six sums of
// neurons; words, values (float32 only), spill_index and spill of TwELL.
std::vector<Tensor> cpu_ffn(Tensor x, Tensor w_gate, MaybeTensor w_up, Tensor w_down, MaybeTensor b_gate, MaybeTensor b_up,
                            MaybeTensor b_down, MaybeTensor rows, MaybeTensor tokens, MaybeTensor sequences, bool squared,
                            bool up_relu, bool counts, bool neurons, int64_t tile, int64_t words, int64_t level_asked) {
  const Level& level = pick_level(level_asked);
  Ffn ffn{};
  ffn.n = x.size(0), ffn.d_model = x.size(1), ffn.d_ff = w_gate.size(0), ffn.chunks = ceil_div(ffn.d_ff, kChunk);
  ffn.narrow = x.scalar_type() == ScalarType::BFloat16;
  ffn.activation = squared ? Activation::relu2 : Activation::relu;
  ffn.up_relu = up_relu;
  ffn.x = x.const_data_ptr();
  ffn.w_gate = w_gate.const_data_ptr();
  ffn.w_up = w_up ? w_up->const_data_ptr() : nullptr;
  ffn.w_down = w_down.const_data_ptr();
  const auto gate_bias = widened(b_gate, ffn.d_ff), up_bias = widened(b_up, ffn.d_ff);
  ffn.b_gate = gate_bias.data(), ffn.b_up = up_bias.data();
  ffn.rows = rows ? rows->const_data_ptr<uint8_t>() : nullptr;
  ffn.tokens = tokens ? tokens->const_data_ptr<int32_t>() : nullptr;
  ffn.sequences = sequences ? sequences->const_data_ptr<int32_t>() : nullptr;

  const int64_t tiles = tile ? ceil_div(ffn.d_ff, tile) : 0;
  std::vector<Tensor> result{torch::stable::empty_like(x)};
  const auto make = [&](bool asked, std::initializer_list<int64_t> shape, ScalarType type) -> void* {
    return asked ? result.emplace_back(torch::stable::new_empty(x, shape, type)).mutable_data_ptr() : nullptr;
  };
  void* y = result[0].mutable_data_ptr();
  auto* finite = static_cast<bool*>(make(true, {ffn.n}, ScalarType::Bool));
  auto* nnz = static_cast<int32_t*>(make(counts, {ffn.n}, ScalarType::Int));
  auto* used = static_cast<int32_t*>(make(counts && up_relu, {ffn.n}, ScalarType::Int));
  ffn.tile = tile, ffn.words = words;
  ffn.tiles = static_cast<int32_t*>(make(tile, {ffn.n, tiles}, ScalarType::Int));
  const Floats spill(words ? ffn.n * tiles * tile : 0);
  ffn.spill = spill.data();
  const size_t sums_at = result.size();
  ffn.packed = static_cast<int32_t*>(make(words, {ffn.n, tiles, words}, ScalarType::Int));
  ffn.slots = static_cast<float*>(make(words && !ffn.narrow, {ffn.n, tiles, words - 1}, ScalarType::Float));
  Cells cells(ffn);

  std::optional<Panels> panels;
  if (ffn.n >= kFewRows) {
    ffn.shared = &panels.emplace(ffn, level);
    ffn.panels = Panels::get;
  }
  const Plan plan(ffn);
  const bool direct = !ffn.narrow && plan.splits == 1;
  const Floats partial(direct ? 0 : plan.splits * ffn.n * ffn.d_model);
  float* out = direct ? static_cast<float*>(y) : partial.data();
  const auto start = widened(b_down, ffn.d_model);
  const auto run = [&](Threads& threads) {
    run_units(ffn, level, plan, start, out, threads);
    finish(ffn, plan, out, y, finite, nnz, used);
  };
  std::optional<Threads> threads(std::in_place, ffn, plan, neurons);
  run(*threads);

  // A row is known not to be finite only at its end, when its neurons are summed already. Rare: sum again without it.
  std::vector<uint8_t> counted;
  if (neurons && !std::all_of(finite, finite + ffn.n, [](bool each) { return each; })) {
    for (int64_t row = 0; row < ffn.n; ++row) counted.push_back(finite[row] && (!ffn.rows || ffn.rows[row]));
    ffn.rows = counted.data();
    run(threads.emplace(ffn, plan, neurons));
  }
  if (neurons) {
    const auto sums = joined(*threads, x);
    result.insert(result.begin() + sums_at, sums.begin(), sums.end());
  }
  if (words) {
    const auto [places, dense] = spilled(ffn, x, tiles);
    result.insert(result.end(), {places, dense});
  }
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def(
      "cpu_ffn(Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, Tensor? b_down, "
      "Tensor? rows, Tensor? tokens, Tensor? sequences, bool squared, bool up_relu, bool counts, bool neurons, "
      "int tile, int words, int level) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CPU, m) { m.impl("cpu_ffn", TORCH_BOX(&cpu_ffn)); }
