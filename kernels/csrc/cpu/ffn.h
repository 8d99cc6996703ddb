// What the CPU kernel is handed and what one unit of its work is. No torch here: bindings.cpp fills this in.
//
// Sources compiled for one vector level include this and plain C headers alone: an inline function of the
// standard library, compiled with AVX-512, could become the copy that every level uses.
#pragma once
#include <cstdint>

#include "common/probes.h"

namespace twell::cpu {

constexpr int64_t kChunk = 512;           // neurons at a time: a multiple of every tile and panel width
constexpr int64_t kStride = kChunk + 16;  // floats between rows of a chunk's matrices, off the powers of two
constexpr int64_t kRows = 96;             // rows of a block, at most
constexpr int64_t kFewRows = 64;          // below this many, products read the weights as they lie
constexpr int64_t kPanel = 32;            // neurons of a packed panel, at most

enum class Activation { relu, relu2 };
enum class Weights { gate, up };

struct Ffn {
  int64_t n, d_model, d_ff, chunks;
  bool narrow;  // x, weights and y are bfloat16; else float32
  Activation activation;
  bool up_relu;
  const void* x;             // [n, d_model]
  const void* w_gate;        // [d_ff, d_model]
  const void* w_up;          // [d_ff, d_model]; null in a plain FFN
  const void* w_down;        // [d_ff, d_model], a neuron a row
  const float* b_gate;       // [d_ff + kPanel], zeros where there is no bias
  const float* b_up;         // [d_ff + kPanel]
  const uint8_t* rows;       // [n] or null; for the neurons' sums
  const int32_t* tokens;     // [n]
  const int32_t* sequences;  // [n]
  int64_t tile, words;       // columns of a tile, and 32-bit words of a packed one: its count and its slots

  int32_t* fired;   // [n, chunks]
  int32_t* used;    // [n, chunks] or null
  int32_t* tiles;   // [n, tiles] or null, tiles = ceil(d_ff / tile)
  uint8_t* finite;  // [n, chunks]
  int32_t* packed;  // [n, tiles, words] or null: TwELL, as layout.py describes it
  float* slots;     // [n, tiles, words - 1]: its values, float32 only
  float* spill;     // [n, tiles, tile]: those past their slots, dense; the others are not touched

  // Packed panels of a chunk, made by whoever asks first; only where n >= kFewRows.
  const float* (*panels)(const Ffn&, Weights, int64_t chunk);
  void* shared;  // what `panels` works on
};

// The sums of one neuron: fires, value_sum, …; of no rows to begin with.
struct Neuron {
#define TWELL_MEMBER(name, type, empty, ...) type name = empty;
  TWELL_NEURON_SUMS(TWELL_MEMBER)
#undef TWELL_MEMBER
};

// What the list says of a sum, as functions. They are internal to each source, as each vector level compiles its own.
namespace {

template <class T>
void add(T& sum, T other) {
  sum += other;
}

template <class T>
void least(T& sum, T other) {
  if (other < sum) sum = other;
}

template <class T>
void greatest(T& sum, T other) {
  if (other > sum) sum = other;
}

inline void add_firing(Neuron& sums, float value, int64_t steps, int32_t token, int32_t sequence) {
#define TWELL_ADD(name, type, empty, combine, firing) combine(sums.name, static_cast<type>(firing));
  TWELL_NEURON_SUMS(TWELL_ADD)
#undef TWELL_ADD
}

inline void add_sums(Neuron& sums, const Neuron& other) {
#define TWELL_ADD(name, type, empty, combine, ...) combine(sums.name, other.name);
  TWELL_NEURON_SUMS(TWELL_ADD)
#undef TWELL_ADD
}

}  // namespace

// Rows [row, row_end) through chunks [chunk, chunk_end): the share of y that these neurons give.
struct Unit {
  int64_t row, row_end, chunk, chunk_end;
  float* y;         // [row_end - row, d_model], set to b_down or zero by whoever made it
  Neuron* neurons;  // [d_ff] of this thread, or null
};

// Memory of one thread, 64-byte aligned.
struct Scratch {
  float* x;         // [kRows, d_model], bfloat16 only
  float* gate;      // [kRows, kStride]
  float* up;        // [kRows, kStride]
  float* panel;     // [kChunk, kPanel]
  float* fired;     // [kStride]: the gates of a row's fired neurons
  float* hidden;    // [kStride]: their values, times up
  uint16_t* index;  // [kRows * kChunk + 64]: fired neurons of a chunk, row after row
};

// The same code compiled for one kind of vector unit.
struct Level {
  int panel;  // neurons of a packed panel
  void (*pack)(const Ffn&, Weights, int64_t chunk, float* out);
  void (*run)(const Ffn&, const Unit&, const Scratch&);
};

extern const Level portable;
#ifdef TWELL_X86
extern const Level avx2;
extern const Level avx512;
#endif

}  // namespace twell::cpu
