// Memory, threads and order of the CPU kernel: what surrounds its units. Compiled for any processor.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "cpu/ffn.h"

namespace {

using namespace twell::cpu;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Uninitialised floats, aligned to a cache line; pages are touched only as they are used.
class Floats {
 public:
  explicit Floats(int64_t count)
      : data_(static_cast<float*>(::operator new(std::max<int64_t>(count, 1) * 4, kAlign))) {}
  ~Floats() { ::operator delete(data_, kAlign); }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  float* data() const { return data_; }

 private:
  static constexpr std::align_val_t kAlign{64};
  float* data_;
};

// The best level this machine runs, or the one asked for: 0 portable, 1 AVX2, 2 AVX-512; -1 the best.
inline const Level& pick_level(int64_t asked) {
#ifdef TWELL_X86
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const int64_t best = has_avx512 ? 2 : has_avx2 ? 1 : 0;
  STD_TORCH_CHECK(asked <= best, "level: expected at most ", best, " on this processor, got ", asked);
  const Level* levels[] = {&portable, &avx2, &avx512};
  return *levels[asked < 0 ? best : asked];
#else
  STD_TORCH_CHECK(asked <= 0, "level: expected 0 on this processor, got ", asked);
  return portable;
#endif
}

// Weights as panels, a chunk at a time, each packed by the first thread that asks for it.
class Panels {
 public:
  Panels(const Ffn& ffn, const Level& level)
      : level_(level), chunk_(ceil_div(kChunk, level.panel) * level.panel * ffn.d_model) {
    for (auto& weights : weights_) {
      weights.memory = std::make_unique<Floats>(chunk_ * ffn.chunks);
      weights.once = std::make_unique<std::once_flag[]>(ffn.chunks);
    }
  }
  static const float* get(const Ffn& ffn, Weights which, int64_t chunk) {
    auto& self = *static_cast<Panels*>(ffn.shared);
    auto& weights = self.weights_[which == Weights::up];
    float* out = weights.memory->data() + chunk * self.chunk_;
    std::call_once(weights.once[chunk], [&] { self.level_.pack(ffn, which, chunk, out); });
    return out;
  }

 private:
  struct Packed {
    std::unique_ptr<Floats> memory;
    std::unique_ptr<std::once_flag[]> once;
  };
  const Level& level_;
  const int64_t chunk_;
  Packed weights_[2];
};

// How rows and chunks are cut into units; from shapes alone, so that threads change no bit.
struct Plan {
  int64_t block = 1, blocks = 0, splits = 1;

  explicit Plan(const Ffn& ffn) {
    constexpr int64_t wanted = 16, tall = 6;
    if (!ffn.n) return;
    const bool few = ffn.n < kFewRows;
    block = few ? ffn.n : std::clamp<int64_t>(ceil_div(ffn.n * ffn.chunks, wanted * tall) * tall, 24, kRows);
    blocks = ceil_div(ffn.n, block);
    splits = std::min(ffn.chunks, ceil_div(wanted, blocks));
  }
};

// What chunks count of each row, where the op returns only their sum.
struct Cells {
  std::vector<int32_t> fired, used;
  std::vector<uint8_t> finite;

  explicit Cells(Ffn& ffn)
      : fired(ffn.n * ffn.chunks), used(ffn.up_relu ? ffn.n * ffn.chunks : 0), finite(ffn.n * ffn.chunks) {
    ffn.fired = fired.data();
    ffn.used = ffn.up_relu ? used.data() : nullptr;
    ffn.finite = finite.data();
  }
};

// Every thread's scratch, and its sums of neurons where they are asked for.
class Threads {
 public:
  static constexpr int64_t kWorth = 1 << 20;  // multiplications of the gate product that pay for waking a thread
  const int64_t count, neurons;

  Threads(const Ffn& ffn, const Plan& plan, bool with_neurons)
      : count(std::clamp<int64_t>(std::min(plan.blocks * plan.splits, ffn.n * ffn.d_ff * ffn.d_model / kWorth), 1,
                                  torch::stable::get_num_threads())),
        neurons(with_neurons ? ffn.d_ff : 0),
        x_(ffn.narrow ? plan.block * ffn.d_model : 0),
        matrix_(plan.block * kStride),
        stride_(ceil_div(x_ + 2 * matrix_ + kChunk * kPanel + 2 * kStride + plan.block * kChunk / 2 + 32, 16) * 16),
        memory_(stride_ * count),
        sums_(neurons * count) {}

  Scratch scratch(int64_t thread) const {
    Scratch s;
    float* at = memory_.data() + thread * stride_;
    s.x = std::exchange(at, at + x_);
    s.gate = std::exchange(at, at + matrix_);
    s.up = std::exchange(at, at + matrix_);
    s.panel = std::exchange(at, at + kChunk * kPanel);
    s.fired = std::exchange(at, at + kStride);
    s.hidden = std::exchange(at, at + kStride);
    s.index = reinterpret_cast<uint16_t*>(at);
    return s;
  }

  Neuron* own(int64_t thread) { return neurons ? sums_.data() + thread * neurons : nullptr; }

  // One neuron's sums over all threads: integers and extremes, so the same in any order.
  Neuron sum(int64_t neuron) const {
    Neuron all = sums_[neuron];
    for (int64_t thread = 1; thread < count; ++thread) add_sums(all, sums_[thread * neurons + neuron]);
    return all;
  }

 private:
  const int64_t x_, matrix_, stride_;  // floats
  Floats memory_;
  std::vector<Neuron> sums_;
};

// Runs every unit, each by whichever thread is free. y is [splits, n, d_model], begun as `start` [d_model] in split 0.
inline void run_units(const Ffn& ffn, const Level& level, const Plan& plan, const std::vector<float>& start, float* y,
                      Threads& threads) {
  std::atomic<int64_t> next{0};
  const int64_t units = plan.blocks * plan.splits;
  torch::stable::parallel_for(0, threads.count, 1, [&](int64_t thread, int64_t end) {
    for (; thread < end; ++thread)
      for (int64_t u; (u = next.fetch_add(1)) < units;) {
        const int64_t row = u / plan.splits * plan.block, split = u % plan.splits;
        Unit unit{row,
                  std::min(row + plan.block, ffn.n),
                  split * ffn.chunks / plan.splits,
                  (split + 1) * ffn.chunks / plan.splits,
                  y + (split * ffn.n + row) * ffn.d_model,
                  threads.own(thread)};
        for (int64_t r = 0; r < unit.row_end - row; ++r)
          if (split)
            std::fill_n(unit.y + r * ffn.d_model, ffn.d_model, 0.f);
          else
            std::copy_n(start.data(), ffn.d_model, unit.y + r * ffn.d_model);
        level.run(ffn, unit, threads.scratch(thread));
      }
  });
}

inline uint16_t narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16) | 0x40;  // NaN
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Empties what a row that is not finite has counted.
inline void forget(const Ffn& ffn, int64_t row) {
  if (!ffn.tile) return;
  const int64_t tiles = ceil_div(ffn.d_ff, ffn.tile);
  std::fill_n(ffn.tiles + row * tiles, tiles, 0);
  if (ffn.packed) std::fill_n(ffn.packed + row * tiles * ffn.words, tiles * ffn.words, 0);
  if (ffn.slots) std::fill_n(ffn.slots + row * tiles * (ffn.words - 1), tiles * (ffn.words - 1), 0.f);
}

// Adds the splits, row by row, narrows them, and sums what the chunks counted.
// y [splits, n, d_model]; out [n, d_model] in x's type, perhaps y itself; finite [n]; nnz, used [n] or null
inline void finish(const Ffn& ffn, const Plan& plan, float* y, void* out, bool* finite, int32_t* nnz, int32_t* used) {
  torch::stable::parallel_for(0, ffn.n, 64, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const int64_t cell = row * ffn.chunks;
      const auto sum = [&](const int32_t* counts) { return std::accumulate(counts, counts + ffn.chunks, 0); };
      finite[row] = std::all_of(ffn.finite + cell, ffn.finite + cell + ffn.chunks, [](uint8_t each) { return each; });
      if (nnz) nnz[row] = finite[row] ? sum(ffn.fired + cell) : 0;
      if (used) used[row] = finite[row] ? sum(ffn.used + cell) : 0;
      if (!finite[row]) forget(ffn, row);
      float* own = y + row * ffn.d_model;
      for (int64_t split = 1; split < plan.splits; ++split)
        for (int64_t k = 0; k < ffn.d_model; ++k) own[k] += y[(split * ffn.n + row) * ffn.d_model + k];
      if (!finite[row]) std::fill_n(own, ffn.d_model, std::numeric_limits<float>::quiet_NaN());
      if (ffn.narrow)
        std::transform(own, own + ffn.d_model, static_cast<uint16_t*>(out) + row * ffn.d_model, narrowed);
      else if (own != static_cast<float*>(out) + row * ffn.d_model)
        std::copy_n(own, ffn.d_model, static_cast<float*>(out) + row * ffn.d_model);
    }
  });
}

}  // namespace
