// The op `twell::cpu_ffn`: tensors in, tensors out.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <type_traits>

#include "common/arguments.h"
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

// The type of a tensor of sums: of the same size, and signed.
template <typename Sum>
constexpr ScalarType tensor_type() {
  static_assert(std::is_same_v<Sum, float> || std::is_integral_v<Sum>);
  if (std::is_same_v<Sum, float>) return ScalarType::Float;
  return sizeof(Sum) == 8 ? ScalarType::Long : ScalarType::Int;
}

// The threads' sums as one: those of TWELL_NEURON_SUMS, in that order, each [d_ff].
std::vector<Tensor> joined(const Threads& threads, const Tensor& like) {
  const int64_t d_ff = threads.neurons;
  std::vector<Tensor> out;
#define TWELL_RESULT(name, type, ...)    \
  type* const name = static_cast<type*>( \
      out.emplace_back(torch::stable::new_empty(like, {d_ff}, tensor_type<type>())).mutable_data_ptr());
  TWELL_NEURON_SUMS(TWELL_RESULT)
#undef TWELL_RESULT
  for (int64_t j = 0; j < d_ff; ++j) {
    const Neuron all = threads.sum(j);
#define TWELL_STORE(name, ...) name[j] = all.name;
    TWELL_NEURON_SUMS(TWELL_STORE)
#undef TWELL_STORE
  }
  return out;
}

// What TwELL keeps of tiles past their slots: their places in `spill`, int32 [n, tiles], and [spilled, tile] of x's
// type.
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

// The op's arguments, in the order of its schema, as kernels/backends/cpu.py has checked them. n: rows of x.
struct Arguments {
  using Fields = twell::Types<Tensor, Tensor, MaybeTensor, Tensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor,
                              MaybeTensor, MaybeTensor, bool, bool, bool, bool, int64_t, int64_t, int64_t>;
  Tensor x;               // [n, d_model]
  Tensor w_gate;          // [d_ff, d_model]
  MaybeTensor w_up;       // [d_ff, d_model]; none in a plain FFN
  Tensor w_down;          // [d_ff, d_model], a neuron a row
  MaybeTensor b_gate;     // [d_ff]
  MaybeTensor b_up;       // [d_ff]
  MaybeTensor b_down;     // [d_model]
  MaybeTensor rows;       // uint8 [n]: 0 where a row does not enter the neurons' sums
  MaybeTensor tokens;     // int32 [n]
  MaybeTensor sequences;  // int32 [n]
  bool squared, up_relu;  // ReLU squared; a ReLU on the up branch too
  bool counts, neurons;   // the probes
  int64_t tile;           // columns of the tiles to count in and to pack into; 0: neither
  int64_t words;          // of a packed tile; 0: TwELL is not wanted
  int64_t level;          // as pick_level takes it
};

template <typename T>
const T* data_of(const MaybeTensor& tensor) {
  return tensor ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

// Sizes and inputs; the biases, as float32, outlive what is returned.
Ffn inputs_of(const Arguments& a, const std::vector<float>& gate_bias, const std::vector<float>& up_bias) {
  Ffn ffn{};
  ffn.n = a.x.size(0), ffn.d_model = a.x.size(1), ffn.d_ff = a.w_gate.size(0), ffn.chunks = ceil_div(ffn.d_ff, kChunk);
  ffn.narrow = a.x.scalar_type() == ScalarType::BFloat16;
  ffn.activation = a.squared ? Activation::relu2 : Activation::relu;
  ffn.up_relu = a.up_relu;
  ffn.x = a.x.const_data_ptr(), ffn.w_gate = a.w_gate.const_data_ptr(), ffn.w_down = a.w_down.const_data_ptr();
  ffn.w_up = data_of<void>(a.w_up);
  ffn.b_gate = gate_bias.data(), ffn.b_up = up_bias.data();
  ffn.rows = data_of<uint8_t>(a.rows), ffn.tokens = data_of<int32_t>(a.tokens),
  ffn.sequences = data_of<int32_t>(a.sequences);
  ffn.tile = a.tile, ffn.words = a.words;
  return ffn;
}

// The tensors that the op returns, and where in them the kernel writes.
struct Results {
  std::vector<Tensor> tensors;
  void* y;         // [n, d_model], as x
  bool* finite;    // [n]
  int32_t* nnz;    // [n] or null
  int32_t* used;   // [n] or null
  size_t sums_at;  // where among the tensors the neurons' sums go

  Results(const Arguments& a, Ffn& ffn) : tensors{torch::stable::empty_like(a.x)} {
    const int64_t n = ffn.n, tiles = a.tile ? ceil_div(ffn.d_ff, a.tile) : 0;
    const auto make = [&](bool wanted, std::initializer_list<int64_t> shape, ScalarType type) -> void* {
      return wanted ? tensors.emplace_back(torch::stable::new_empty(a.x, shape, type)).mutable_data_ptr() : nullptr;
    };
    y = tensors[0].mutable_data_ptr();
    finite = static_cast<bool*>(make(true, {n}, ScalarType::Bool));
    nnz = static_cast<int32_t*>(make(a.counts, {n}, ScalarType::Int));
    used = static_cast<int32_t*>(make(a.counts && a.up_relu, {n}, ScalarType::Int));
    ffn.tiles = static_cast<int32_t*>(make(a.tile, {n, tiles}, ScalarType::Int));
    sums_at = tensors.size();
    ffn.packed = static_cast<int32_t*>(make(a.words, {n, tiles, a.words}, ScalarType::Int));
    ffn.slots = static_cast<float*>(make(a.words && !ffn.narrow, {n, tiles, a.words - 1}, ScalarType::Float));
  }
};

// Runs the products into `out`, and returns the threads with their sums of neurons. A row is known not to be finite
// only at its end, when its neurons are summed already: that is rare, and all is then run again without it.
void run_counted(Ffn& ffn, const Level& level, const Plan& plan, const std::vector<float>& start, float* out,
                 const Results& results, bool neurons, std::optional<Threads>& threads) {
  const auto run = [&](Threads& own) {
    run_units(ffn, level, plan, start, out, own);
    finish(ffn, plan, out, results.y, results.finite, results.nnz, results.used);
  };
  run(threads.emplace(ffn, plan, neurons));
  if (!neurons || std::all_of(results.finite, results.finite + ffn.n, [](bool finite) { return finite; })) return;
  std::vector<uint8_t> counted;
  for (int64_t row = 0; row < ffn.n; ++row) counted.push_back(results.finite[row] && (!ffn.rows || ffn.rows[row]));
  ffn.rows = counted.data();
  run(threads.emplace(ffn, plan, neurons));
}

// Returns y and finite, and of the following what is wanted: nnz; nnz_used; tile counts [n, tiles]; the sums of
// neurons; words, values (float32 only), spill_index and spill of TwELL.
std::vector<Tensor> cpu_ffn(Arguments a) {
  const Level& level = pick_level(a.level);
  const auto gate_bias = widened(a.b_gate, a.w_gate.size(0)), up_bias = widened(a.b_up, a.w_gate.size(0));
  Ffn ffn = inputs_of(a, gate_bias, up_bias);
  Results results(a, ffn);
  const int64_t tiles = a.tile ? ceil_div(ffn.d_ff, a.tile) : 0;
  const Floats spill(a.words ? ffn.n * tiles * a.tile : 0);
  ffn.spill = spill.data();
  Cells cells(ffn);

  std::optional<Panels> panels;
  if (ffn.n >= kFewRows) {
    ffn.shared = &panels.emplace(ffn, level);
    ffn.panels = Panels::get;
  }
  const Plan plan(ffn);
  const bool direct = !ffn.narrow && plan.splits == 1;
  const Floats partial(direct ? 0 : plan.splits * ffn.n * ffn.d_model);
  float* out = direct ? static_cast<float*>(results.y) : partial.data();
  std::optional<Threads> threads;
  run_counted(ffn, level, plan, widened(a.b_down, ffn.d_model), out, results, a.neurons, threads);

  auto& tensors = results.tensors;
  if (a.neurons) {
    const auto sums = joined(*threads, a.x);
    tensors.insert(tensors.begin() + results.sums_at, sums.begin(), sums.end());
  }
  if (a.words) {
    const auto [index, dense] = spilled(ffn, a.x, tiles);
    tensors.insert(tensors.end(), {index, dense});
  }
  return tensors;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(twell, m) {
  m.def(
      "cpu_ffn(Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, Tensor? b_down, "
      "Tensor? rows, Tensor? tokens, Tensor? sequences, bool squared, bool up_relu, bool counts, bool neurons, "
      "int tile, int words, int level) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(twell, CPU, m) {
  m.impl("cpu_ffn", TORCH_BOX((&twell::ByPosition<cpu_ffn, Arguments>::call)));
}
