// One unit of the FFN: rows of a block through chunks of neurons. Compiled once a vector level.
//
// A chunk takes its gate product dense, as it must, and lists each row's fired neurons. While few fire, a row takes one
// dot product with the up weights and one scaled row of the down weights for each of them, both read in order. Where
// more of the chunk fires than `kDenseShare`, it goes on with dense products. Both are exact for any density.
#include "cpu/ffn.h"
#include "cpu/products.h"

namespace {

using namespace twell::cpu;

// Up and down for one fired neuron, over one dense neuron of a row: where the two ways take the same time.
constexpr double kDenseShare = kLanes == 16 ? 0.28 : kLanes == 8 ? 0.47 : 0.75;
constexpr float kFixedPoint = 1 << 20, kValueCap = 1 << 20;  // the value sums' step, and the most that enters one

// The value of a fired neuron, as the input's type holds it.
template <class T, Activation kActivation>
Vec activated(Vec gate) {
  const Vec value = kActivation == Activation::relu ? gate : gate * gate;
  return sizeof(T) == 2 ? rounded(value) : value;
}

template <class T, Activation kActivation>
class Block {
 public:
  Block(const Ffn& ffn, const Unit& unit, const Scratch& scratch)
      : ffn(ffn), unit(unit), s(scratch), rows(unit.row_end - unit.row), depth(ffn.d_model) {
    if constexpr (sizeof(T) == 4) {
      x = static_cast<const float*>(ffn.x) + unit.row * depth;
    } else {
      const T* narrow = static_cast<const T*>(ffn.x) + unit.row * depth;
      for (int64_t i = 0; i < rows * depth; ++i) s.x[i] = widen(narrow[i]);
      x = s.x;
    }
  }

  void run() {
    for (int64_t chunk = unit.chunk; chunk < unit.chunk_end; ++chunk) {
      first = chunk * kChunk;
      width = ffn.d_ff - first < kChunk ? ffn.d_ff - first : kChunk;
      product(Weights::gate, chunk, s.gate);
      const int64_t pairs = list(chunk);
      if (ffn.tiles) count_tiles();
      if (ffn.packed) pack_tiles();
      if (unit.neurons) sum_neurons();
      if (pairs > kDenseShare * double(rows * width) && (rows > kTall || !ffn.w_up))
        dense(chunk);
      else
        sparse(chunk);
    }
  }

 private:
  const Ffn& ffn;
  const Unit& unit;
  const Scratch& s;
  const int64_t rows, depth;
  const float* x;                 // [rows, depth]
  int64_t first = 0, width = 0;   // the chunk's neurons
  int64_t begin[kRows + 1] = {};  // of each row's list in s.index

  // `first`'s row of a weight [d_ff, depth].
  const T* chunk_of(const void* weight) const { return static_cast<const T*>(weight) + first * depth; }

  int64_t cell(int64_t row, int64_t chunk) const { return (unit.row + row) * ffn.chunks + chunk; }

  // out [rows, width] = x weight^T + bias, and zeros to the end of the last vector
  void product(Weights which, int64_t chunk, float* out) const {
    const float* bias = (which == Weights::gate ? ffn.b_gate : ffn.b_up) + first;
    if (ffn.panels) {
      const float* panel = ffn.panels(ffn, which, chunk);
      for (int64_t j = 0; j < width; j += kWide, panel += depth * kWide)
        panel_product(x, depth, panel, kWide, depth, out + j, kStride, bias + j, rows);
    } else {
      const T* weight = chunk_of(which == Weights::gate ? ffn.w_gate : ffn.w_up);
      few_rows_product(x, weight, depth, bias, rows, width, out);
    }
    if (width % kLanes)
      for (int64_t r = 0; r < rows; ++r) memset(out + r * kStride + width, 0, kLanes * sizeof(float));
  }

  // Lists the fired neurons of each row, as positions in the chunk, ascending; returns how many there are.
  int64_t list(int64_t chunk) {
    int64_t count = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const float* gate = s.gate + r * kStride;
      begin[r] = count;
      Vec unlike = {};  // stays zero while all is finite
      for (int64_t j = 0; j < width; j += kLanes) {
        const Vec z = load(gate + j);
        unlike += z * 0.f;
        count += append_positive(z, j, s.index + count);
      }
      ffn.finite[cell(r, chunk)] = sum_of_lanes(unlike) == 0;
      ffn.fired[cell(r, chunk)] = int32_t(count - begin[r]);
    }
    begin[rows] = count;
    return count;
  }

  void count_tiles() const {
    for (int64_t r = 0; r < rows; ++r) {
      int32_t* counts = ffn.tiles + first_tile(r);
      for (int64_t t = 0; t * ffn.tile < width; ++t) counts[t] = 0;
      for (int64_t i = begin[r]; i < begin[r + 1]; ++i) ++counts[s.index[i] / ffn.tile];
    }
  }

  // Of a row's tiles in this chunk, the first one's place in [n, tiles].
  int64_t first_tile(int64_t row) const {
    return (unit.row + row) * ((ffn.d_ff + ffn.tile - 1) / ffn.tile) + first / ffn.tile;
  }

  void pack_tiles() const {
    for (int64_t r = 0; r < rows; ++r) {
      const uint16_t* index = s.index + begin[r];
      const float* value = s.fired;
      values(r);
      for (int64_t from = 0, tile = first_tile(r); from < width; from += ffn.tile, ++tile) {
        const int32_t count = ffn.tiles[tile];
        pack_tile(tile, from, index, value, count);
        index += count;
        value += count;
      }
    }
  }

  // One tile of a row: `count` neurons at index, relative to `from`, and their values.
  void pack_tile(int64_t tile, int64_t from, const uint16_t* index, const float* value, int32_t count) const {
    const int64_t slots = ffn.words - 1, kept = count < slots ? count : slots;
    int32_t* word = ffn.packed + tile * ffn.words;
    word[0] = count;
    for (int64_t i = 0; i < kept; ++i) {
      uint32_t bits = 0;
      if (sizeof(T) == 2) memcpy(&bits, value + i, 4);
      word[1 + i] = int32_t((bits & 0xffff0000u) | uint32_t(index[i] - from));
    }
    memset(word + 1 + kept, 0, (slots - kept) * sizeof(int32_t));
    if (sizeof(T) == 4) {
      memcpy(ffn.slots + tile * slots, value, kept * sizeof(float));
      memset(ffn.slots + tile * slots + kept, 0, (slots - kept) * sizeof(float));
    }
    if (count <= slots) return;
    float* dense = ffn.spill + tile * ffn.tile;
    memset(dense, 0, ffn.tile * sizeof(float));
    for (int32_t i = 0; i < count; ++i) dense[index[i] - from] = value[i];
  }

  void sum_neurons() const {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = unit.row + r;
      if (ffn.rows && !ffn.rows[row]) continue;
      const int32_t token = ffn.tokens[row], sequence = ffn.sequences[row];
      values(r);
      for (int64_t i = begin[r]; i < begin[r + 1]; ++i) {
        const float value = s.fired[i - begin[r]];
        const float scaled = value * kFixedPoint, most = kValueCap * kFixedPoint;
        const int64_t steps = __builtin_llrintf(scaled < most ? scaled : most);
        add_firing(unit.neurons[first + s.index[i]], value, steps, token, sequence);
      }
    }
  }

  // The values of a row's fired neurons, in s.fired.
  void values(int64_t row) const {
    gather(row);
    for (int64_t i = 0; i < begin[row + 1] - begin[row]; i += kLanes)
      store(s.fired + i, activated<T, kActivation>(load(s.fired + i)));
  }

  // The gate of a row's fired neurons, in s.fired, and zeros to the end of the last vector.
  void gather(int64_t row) const {
    const uint16_t* index = s.index + begin[row];
    const int64_t count = begin[row + 1] - begin[row];
    for (int64_t i = 0; i < count; ++i) s.fired[i] = s.gate[row * kStride + index[i]];
    store(s.fired + count, Vec{});
  }

  // out [count] = value * up where the gate is above zero, else 0; notes what is not finite, and products above zero.
  void multiply(int64_t row, int64_t chunk, const float* gate, const float* up, int64_t count, float* out) const {
    Vec unlike = {};
    Ints used = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vec z = load(gate + i), zero = {};
      Vec h = activated<T, kActivation>(z);
      if (ffn.w_up) {
        Vec u = load(up + i);
        if (ffn.up_relu) u = u < zero ? zero : u;  // NaN stays
        used -= (z > zero) & (u > zero);
        h *= u;
        if (sizeof(T) == 2) h = rounded(h);
      }
      h = z > zero ? h : zero;
      unlike += h * 0.f;
      store(out + i, h);
    }
    if (sum_of_lanes(unlike) != 0) ffn.finite[cell(row, chunk)] = 0;
    if (!ffn.used) return;
    int32_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += used[lane];
    ffn.used[cell(row, chunk)] = sum;
  }

  void sparse(int64_t chunk) const {
    for (int64_t r = 0; r < rows; ++r) {
      const uint16_t* index = s.index + begin[r];
      const int64_t count = begin[r + 1] - begin[r];
      gather(r);
      if (ffn.w_up) {
        listed_dots(x + r * depth, chunk_of(ffn.w_up), depth, index, count, s.hidden);
        for (int64_t i = 0; i < count; ++i) s.hidden[i] += ffn.b_up[first + index[i]];
      }
      multiply(r, chunk, s.fired, s.hidden, count, s.hidden);
      add_listed(unit.y + r * depth, chunk_of(ffn.w_down), depth, index, s.hidden, count);
    }
  }

  void dense(int64_t chunk) const {
    if (ffn.w_up) product(Weights::up, chunk, s.up);
    for (int64_t r = 0; r < rows; ++r) {
      float* gate = s.gate + r * kStride;
      multiply(r, chunk, gate, s.up + r * kStride, width, gate);
    }
    down_product(s.gate, chunk_of(ffn.w_down), rows, width, depth, s.panel, unit.y);
  }
};

template <class T>
void run_as(const Ffn& ffn, const Unit& unit, const Scratch& scratch) {
  if (ffn.activation == Activation::relu)
    Block<T, Activation::relu>(ffn, unit, scratch).run();
  else
    Block<T, Activation::relu2>(ffn, unit, scratch).run();
}

void run(const Ffn& ffn, const Unit& unit, const Scratch& scratch) {
  ffn.narrow ? run_as<bf16>(ffn, unit, scratch) : run_as<float>(ffn, unit, scratch);
}

void pack(const Ffn& ffn, Weights which, int64_t chunk, float* out) {
  const void* weight = which == Weights::gate ? ffn.w_gate : ffn.w_up;
  const int64_t first = chunk * kChunk, left = ffn.d_ff - first, neurons = left < kChunk ? left : kChunk;
  if (ffn.narrow)
    pack_panels(static_cast<const bf16*>(weight) + first * ffn.d_model, neurons, ffn.d_model, out);
  else
    pack_panels(static_cast<const float*>(weight) + first * ffn.d_model, neurons, ffn.d_model, out);
}

}  // namespace

const Level twell::cpu::TWELL_LEVEL = {kWide, pack, run};
