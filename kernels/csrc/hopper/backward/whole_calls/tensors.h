// What the ops of the training passes share: from tensors, as the host hands them over, to what the launches take.
#pragma once

#include "common/bindings.h"
#include "common/device.h"
#include "hopper/backward/compact/launches.h"

// The first word of the names of a library's ops, of which there is one for each activation, as activation.cuh has
// them.
#ifdef TWELL_RELU2
#define TWELL_TRAIN "hopper_relu2_train"
#else
#define TWELL_TRAIN "hopper_train"
#endif

namespace twell::hopper {

using Value = __nv_bfloat16;

// x: [..., d_model]
inline int rows_of(const Tensor& x) { return static_cast<int>(x.numel() / x.size(x.dim() - 1)); }
inline int blocks_of(const Tensor& x) { return (rows_of(x) + kBlockRows - 1) / kBlockRows; }
inline int panels_of(const Tensor& w) { return static_cast<int>((w.size(0) + kPanelColumns - 1) / kPanelColumns); }

// values: [3, capacity] of positions, gates and hidden values, of a call of so many rows; or [1 or 2, rows, d_ff] with
// room for all of g and h, where such values lie at the beginning; tables: starts, order, union_sizes, fires and used,
// one after the other.
inline Kept kept_of(const Tensor& values, int64_t capacity, const Tensor& unions, const Tensor& tables, int rows,
                    int panels, int d_ff, float* l1_parts) {
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  Kept k{};
  k.rows = rows;
  k.capacity = static_cast<int>(capacity);
  k.positions = as<uint16_t>(values), k.gates = k.positions + capacity, k.hidden = k.gates + capacity;
  k.starts = as<int>(tables), k.order = k.starts + blocks * (panels + 1);
  k.union_sizes = k.order + blocks * kBlockRows, k.fires = k.union_sizes + blocks, k.used = k.fires + d_ff;
  k.unions = as<uint16_t>(unions), k.l1_parts = l1_parts;
  k.whole = values.dim() == 3 ? k.positions : nullptr;
  return k;
}

constexpr size_t kForwardOffsets = 13, kCompactOffsets = 16, kCompactSizes = 8;

// Rows of each pass of a forward pass: the number that follows its offsets, or all of them.
inline int rows_of_pass(const Offsets& offsets, int rows) {
  return offsets.size() > kForwardOffsets ? static_cast<int>(offsets.back()) : rows;
}

// The forward pass of x in a workspace, of which offsets has heads, tails, masks, spill, fired, row_sums, order,
// unions, union_sizes, hidden, tasks, parts, part_ready; and any number after those. Its results are still to be set.
inline Ffn ffn_of(const Tensor& x, const Tensor& w_gate, const Maybe& w_up, const Tensor& w_down,
                  const Tensor& workspace, const Offsets& offsets) {
  Ffn f{};
  f.planned = true;
  f.rows = rows_of(x), f.d_model = w_gate.size(1), f.d_ff = w_gate.size(0);
  f.tiles = (f.d_ff + kTile - 1) / kTile, f.panels = panels_of(w_gate), f.blocks = blocks_of(x);
  f.x = address(x), f.w_gate = address(w_gate), f.w_up = address(w_up), f.w_down = address(w_down);
  const Offsets regions(offsets.begin(), offsets.begin() + std::min(offsets.size(), kForwardOffsets));
  WorkspaceTensor{workspace, regions}.point(f.heads, f.tails, f.masks, f.spill, f.fired, f.row_sums, f.order, f.unions,
                                            f.union_sizes, f.hidden, f.tasks, f.parts, f.part_ready);
  f.dense_tiles =
      f.w_up != nullptr && f.blocks <= kDenseTileBlocks ? reinterpret_cast<int*>(f.row_sums + f.rows + 1) : nullptr;
  f.continues_with_up = f.dense_tiles != nullptr;
  return f;
}

// Launches a forward pass again, which does nothing where all its values were kept, and brings them to where b reads.
// finite: [rows], to be written
inline void repeat_forward(const Backward& b, Ffn f, const Kept& kept, uint8_t* finite, cudaStream_t on) {
  f.finite = finite, f.used = kept.used, f.capacity = kept.capacity;
  Kept again{};
  again.capacity = f.rows * f.d_ff, again.positions = b.kept.positions, again.gates = b.kept.gates;
  again.hidden = b.kept.hidden, again.starts = b.kept.starts;
  launch_gate<Value>(f, on);
  launch_plan<Value>(f, true, on);
  if (f.w_up != nullptr) launch_up<Value>(f, on);
  launch_keep<Value>(f, again, nullptr, on);
  launch_restore<Value>(b, kept, on);
}

// Some rows of a forward pass, from `first` on, a multiple of kWindow; with its workspace, and where their results go.
inline Ffn some_rows(Ffn f, int first, int pass) {
  if (pass >= f.rows) return f;
  f.rows = std::min(pass, f.rows - first), f.blocks = (f.rows + kBlockRows - 1) / kBlockRows;
  f.x = static_cast<const uint16_t*>(f.x) + static_cast<int64_t>(first) * f.d_model;
  if (f.y != nullptr)
    f.y = static_cast<uint16_t*>(f.y) + static_cast<int64_t>(first) * f.d_model, f.finite += first, f.nnz += first;
  f.dense_tiles =
      f.w_up != nullptr && f.blocks <= kDenseTileBlocks ? reinterpret_cast<int*>(f.row_sums + f.rows + 1) : nullptr;
  f.continues_with_up = f.dense_tiles != nullptr;
  return f;
}
inline Kept some_blocks(Kept k, int first, int panels, int d_ff) {
  if (k.whole != nullptr) k.whole += static_cast<int64_t>(first) * kBlockRows * d_ff;
  k.starts += static_cast<int64_t>(first) * (panels + 1), k.order += first * kBlockRows;
  k.unions += static_cast<int64_t>(first) * panels * kPanelColumns;
  k.union_sizes += first, k.l1_parts += first * kKeepCtas;
  return k;
}

// Launches the beginning of a forward pass, which needs x, w_gate and the workspace alone. fires: [d_ff + 1], of Kept;
// pass: so many rows after so many
inline void launch_first(const Ffn& f, int* fires, int pass, cudaStream_t on) {
  check(cudaMemsetAsync(fires, 0, (f.d_ff + 1) * sizeof(int), on), "memset");  // `used` follows them
  launch_gate<Value>(some_rows(f, 0, pass), on);
}

// Launches the rest of a forward pass that keeps its values. counted: [rows] or null
inline void launch_rest(const Ffn& f, const Kept& kept, const uint8_t* counted, int pass, cudaStream_t on) {
  for (int first = 0; first < f.rows; first += pass) {
    const Ffn some = some_rows(f, first, pass);
    if (first > 0) launch_gate<Value>(some, on);
    launch_plan<Value>(some, true, on);
    if (some.w_up != nullptr) launch_up<Value>(some, on);
    launch_down<Value>(some, on);
    launch_keep<Value>(some, some_blocks(kept, first / kBlockRows, f.panels, f.d_ff),
                       counted == nullptr ? nullptr : counted + first, on, first);
  }
}

// What a backward pass reads and writes, but for its results. x, dy and weights must outlive it.
struct BackwardTensors {
  const Tensor &dy, &x, &w_gate, &w_down;  // as the kernels read them, w_down as the transpose of a matrix by neuron
  // none in a plain FFN, which is a gated one whose up values are 1
  const Maybe& w_up;
  const Maybe& zeros;  // [d_ff, d_model], in place of w_up where there is none: its values times du add nothing to dx
  const Tensor& finite;
  const Maybe& counted;
  const float* l1_scale;
  const Tensor &values, &unions, &tables, &workspace;
  // of positions, gates, hidden, starts and finite of a pass that is repeated; then of rank_of, neuron_at, union_ranks,
  // marks, before, tokens, token_counts, places, tasks, task_count, panels_of_rows, chunks, parts, arrived. Of a
  // compact pass: rank_of to task_count, panel_starts, chunk_starts, fits, sums, arrived, arena
  const Offsets& offsets;
  // as for ffn_of, in the same workspace; empty if values has room for all. Of a compact pass: its CompactSizes, and
  // the capacity
  const Offsets& repeat;

  Maybe b_gate{}, b_up{};                  // as the kernels read them
  Maybe d_b_gate{}, d_b_up{}, d_b_down{};  // [d_ff] and [d_model], as the weights' gradients: of those that are wanted
  bool adds = false, adds_down = false;    // whether d_gate and d_up, and d_down, are added to
};

inline Maybe zeros_without(const Maybe& w_up, const Tensor& w_gate) {
  if (w_up) return {};
  Tensor zeros = torch::stable::empty_like(w_gate);
  return torch::stable::zero_(zeros);
}

inline void launch_compact_pass(Backward b, const BackwardTensors& t, cudaStream_t on) {
  int *panel_starts, *fits;
  uint32_t* chunk_starts;
  char *sums, *arena;
  WorkspaceTensor{t.workspace, t.offsets}.point(b.rank_of, b.neuron_at, b.union_ranks, b.marks, b.before, b.tokens,
                                                b.token_counts, b.places, b.tasks, b.task_count, panel_starts,
                                                chunk_starts, fits, sums, b.arrived, arena);
  const CompactSizes sizes{t.repeat[0],
                           static_cast<int>(t.repeat[1]),
                           static_cast<int>(t.repeat[2]),
                           t.repeat[3] != 0,
                           t.repeat[4] != 0,
                           t.repeat[5] != 0,
                           t.repeat[6]};
  b.panels_of_rows = arena;
  launch_compact<Value>(b, panel_starts, chunk_starts, fits, sums, !t.w_up, sizes, on);
}

// Launches a backward pass. dx: [rows, d_model]; the others [d_ff, d_model], all of float32 or of 16 bits, d_up without
// a meaning in a plain FFN.
inline void launch_backward(const BackwardTensors& t, void* dx, void* d_gate, void* d_up, void* d_down,
                            bool float_weights, cudaStream_t on) {
  Backward b{};
  b.rows = rows_of(t.x), b.d_model = t.w_gate.size(1), b.d_ff = t.w_gate.size(0), b.blocks = blocks_of(t.x);
  b.panels = panels_of(t.w_gate);
  b.float_weights = float_weights;
  b.x = address(t.x), b.dy = address(t.dy), b.w_gate = address(t.w_gate), b.w_up = address(t.w_up ? t.w_up : t.zeros);
  b.w_down = address(t.w_down);
  b.finite = as<uint8_t>(t.finite), b.counted = as<uint8_t>(t.counted), b.l1_scale = t.l1_scale;
  const bool compact = t.offsets.size() == kCompactOffsets;
  if (compact && t.repeat.size() != kCompactSizes)
    throw std::runtime_error("sizes of a compact pass: expected 8, got " + std::to_string(t.repeat.size()));
  b.kept = kept_of(t.values, compact ? t.repeat[7] : t.values.size(1), t.unions, t.tables, b.rows, b.panels, b.d_ff,
                   nullptr);
  b.dx = dx, b.d_gate = d_gate, b.d_up = d_up, b.d_down = d_down, b.adds = t.adds, b.adds_down = t.adds_down;
  b.b_gate = address(t.b_gate), b.b_up = address(t.b_up);
  b.d_b_gate = address(t.d_b_gate), b.d_b_up = address(t.d_b_up), b.d_b_down = address(t.d_b_down);
  if (compact) return launch_compact_pass(b, t, on);
  Kept again{};
  uint8_t* finite_again = nullptr;
  WorkspaceTensor{t.workspace, t.offsets}.point(again.positions, again.gates, again.hidden, again.starts, finite_again,
                                                b.rank_of, b.neuron_at, b.union_ranks, b.marks, b.before, b.tokens,
                                                b.token_counts, b.places, b.tasks, b.task_count, b.panels_of_rows,
                                                b.chunks, b.parts, b.arrived);
  if (!t.repeat.empty()) {
    const Kept kept = b.kept;
    b.kept.positions = again.positions, b.kept.gates = again.gates, b.kept.hidden = again.hidden;
    b.kept.starts = again.starts;
    Ffn f = ffn_of(t.x, t.w_gate, t.w_up, t.w_down, t.workspace, t.repeat);
    f.b_gate = b.b_gate, f.b_up = b.b_up;
    repeat_forward(b, f, kept, finite_again, on);
  }
  launch_token_lists<Value>(b, on);
  launch_dh<Value>(b, on);
  launch_dx<Value>(b, on);
  launch_weights<Value>(b, on);
  if (b.d_b_gate != nullptr || b.d_b_up != nullptr) launch_bias_sums<Value>(b, on);
  if (b.d_b_down != nullptr) launch_output_sums<Value>(b, on);
}

// Launches the transpose of a matrix, of float32 or bfloat16, to `to`: bfloat16, or float32 from float32.
inline void launch_transpose_of(const Tensor& from, void* to, bool writes_float) {
  const bool reads_float = from.scalar_type() == torch::headeronly::ScalarType::Float;
  const auto run = writes_float  ? launch_transpose<float, float>
                   : reads_float ? launch_transpose<float, Value>
                                 : launch_transpose<Value, Value>;
  run(address(from), to, from.size(0), from.size(1), stream_of(from));
}

}  // namespace twell::hopper
