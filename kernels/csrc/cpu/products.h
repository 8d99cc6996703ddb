// The kernel's products, in float32: dense ones over packed panels, and sparse ones over lists of neurons.
//
// Every sum has one order, set by shapes alone, so that the same call gives the same bits on any number of threads.
#pragma once
#include "cpu/ffn.h"
#include "cpu/vector.h"

namespace {

constexpr int kWide = 2 * kLanes;  // neurons of a panel: two vectors beside each other
constexpr int kTall = 6;           // rows of a tile: 12 accumulators hide the latency of FMA, and fit 16 registers
// Products of a sum that is taken by itself first, as rounding grows with the length of a sum; fewer where there is no
// FMA, and each product is rounded too.
constexpr int64_t kRun = kLanes >= 8 ? 128 : 32;
static_assert(kWide <= twell::cpu::kPanel && twell::cpu::kChunk % kWide == 0);

// weight [neurons, depth] -> panels [neurons / kWide][depth][kWide], the last one filled up with zeros.
template <class T>
void pack_panels(const T* weight, int64_t neurons, int64_t depth, float* out) {
  for (int64_t first = 0; first < neurons; first += kWide, out += depth * kWide) {
    const int64_t real = neurons - first < kWide ? neurons - first : kWide;
    if (real < kWide) memset(out, 0, depth * kWide * sizeof(float));
    for (int64_t k = 0; k < depth; k += 8)  // 8 x kWide at a time stay in the first cache
      for (int64_t j = 0; j < real; ++j)
        for (int64_t i = k; i < k + 8; ++i) out[i * kWide + j] = widen(weight[(first + j) * depth + i]);
  }
}

// c [kM, kWide] += a [kM, depth] b [depth, kWide], or, with a bias [kWide], c = a b + bias; kRun steps of the depth at
// a time.
template <int kM>
void tile_product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                  int64_t c_stride, const float* bias) {
  for (int64_t from = 0; from < depth; from += kRun) {
    const int64_t to = from + kRun < depth ? from + kRun : depth;
    Vec sum[kM][2] = {};
    for (int64_t k = from; k < to; ++k) {
      const Vec b0 = load(b + k * b_stride), b1 = load(b + k * b_stride + kLanes);
      for (int i = 0; i < kM; ++i) {
        const Vec ai = all(a[i * a_stride + k]);
        sum[i][0] += ai * b0;
        sum[i][1] += ai * b1;
      }
    }
    for (int i = 0; i < kM; ++i)
      for (int j = 0; j < 2; ++j) {
        float* out = c + i * c_stride + j * kLanes;
        store(out, sum[i][j] + load(bias && !from ? bias + j * kLanes : out));
      }
  }
}

// The same for any number of rows.
template <int kM = kTall>
void panel_product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                   int64_t c_stride, const float* bias, int64_t rows) {
  for (; rows >= kM; rows -= kM, a += kM * a_stride, c += kM * c_stride)
    tile_product<kM>(a, a_stride, b, b_stride, depth, c, c_stride, bias);
  if constexpr (kM > 1) panel_product<kM / 2>(a, a_stride, b, b_stride, depth, c, c_stride, bias, rows);
}

// out [kM, 4] = x [kM, depth] times four rows of a weight: dot products along the depth. Every lane is a sum of its
// own, which is short enough where lanes are many; else half a run at a time.
template <int kM, class T>
void dots_of_4(const float* x, int64_t x_stride, const T* const* w, int64_t depth, float* out, int64_t out_stride) {
  Vec sum[kM][4] = {};
  const int64_t run = kLanes >= 8 ? depth : kRun / 2;
  for (int64_t from = 0; from < depth; from += run) {
    const int64_t to = from + run < depth ? from + run : depth;
    Vec part[kM][4] = {};
    int64_t k = from;
    for (; k + kLanes <= to; k += kLanes) {
      Vec b[4];
      for (int j = 0; j < 4; ++j) b[j] = load(w[j] + k);
      for (int i = 0; i < kM; ++i) {
        const Vec a = load(x + i * x_stride + k);
        for (int j = 0; j < 4; ++j) part[i][j] += a * b[j];
      }
    }
    if (k < to)
      for (int i = 0; i < kM; ++i)
        for (int j = 0; j < 4; ++j) part[i][j] += load_part(x + i * x_stride + k, to - k) * load_part(w[j] + k, to - k);
    for (int i = 0; i < kM; ++i)
      for (int j = 0; j < 4; ++j) sum[i][j] += part[i][j];
  }
  for (int i = 0; i < kM; ++i) sums_of_4(sum[i], out + i * out_stride);
}

// out [rows, neurons] = x [rows, depth] weight [neurons, depth]^T + bias, the weight read as it lies.
template <class T>
void few_rows_product(const float* x, const T* weight, int64_t depth, const float* bias, int64_t rows, int64_t neurons,
                      float* out) {
  constexpr int64_t stride = twell::cpu::kStride;
  for (int64_t j = 0; j < neurons; j += 4) {
    const T* w[4] = {weight + j * depth, weight + (j + 1) * depth, weight + (j + 2) * depth, weight + (j + 3) * depth};
    int64_t i = 0;
    for (; i + 2 <= rows; i += 2) dots_of_4<2>(x + i * depth, depth, w, depth, out + i * stride + j, stride);
    if (i < rows) dots_of_4<1>(x + i * depth, depth, w, depth, out + i * stride + j, stride);
    for (i = 0; bias && i < rows; ++i)
      for (int64_t at = j; at < j + 4; ++at) out[i * stride + at] += bias[at];
  }
}

// out [count] = dot products of x [depth] with the listed rows of a weight.
template <class T>
void listed_dots(const float* x, const T* weight, int64_t depth, const uint16_t* index, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += 4) {
    const T* w[4];
    for (int j = 0; j < 4; ++j) w[j] = weight + index[i + j < count ? i + j : count - 1] * depth;
    dots_of_4<1>(x, 0, w, depth, out + i, 0);
  }
}

// y [kVectors * kLanes] += the sum of value[i] * weight[index[i]], columns of a weight whose rows are `depth` long.
template <int kVectors, class T>
void add_listed_strip(float* y, const T* weight, int64_t depth, const uint16_t* index, const float* value,
                      int64_t count) {
  Vec sum[kVectors] = {};
  for (int64_t i = 0; i < count; ++i) {
    const T* row = weight + index[i] * depth;
    const Vec h = all(value[i]);
    for (int v = 0; v < kVectors; ++v) sum[v] += h * load(row + v * kLanes);
  }
  for (int v = 0; v < kVectors; ++v) store(y + v * kLanes, load(y + v * kLanes) + sum[v]);
}

// y [depth] += the sum of value[i] * weight[index[i]], half a run at a time.
template <class T>
void add_listed(float* y, const T* weight, int64_t depth, const uint16_t* index, const float* value, int64_t count) {
  constexpr int kVectors = kRegisters / 2;
  for (; count > 0; count -= kRun / 2, index += kRun / 2, value += kRun / 2) {
    const int64_t some = count < kRun / 2 ? count : kRun / 2;
    int64_t k = 0;
    for (; k + kVectors * kLanes <= depth; k += kVectors * kLanes)
      add_listed_strip<kVectors>(y + k, weight + k, depth, index, value, some);
    for (; k + 2 * kLanes <= depth; k += 2 * kLanes) add_listed_strip<2>(y + k, weight + k, depth, index, value, some);
    for (; k + kLanes <= depth; k += kLanes) add_listed_strip<1>(y + k, weight + k, depth, index, value, some);
    for (; k < depth; ++k) {
      float sum = 0;
      for (int64_t i = 0; i < some; ++i) sum += value[i] * widen(weight[index[i] * depth + k]);
      y[k] += sum;
    }
  }
}

// y [rows, depth] += h [rows, neurons] weight [neurons, depth]; `panel` is room for [neurons, kWide].
template <class T>
void down_product(const float* h, const T* weight, int64_t rows, int64_t neurons, int64_t depth, float* panel,
                  float* y) {
  for (int64_t k = 0; k < depth; k += kWide) {
    const int64_t real = depth - k < kWide ? depth - k : kWide;
    for (int64_t j = 0; j < neurons; ++j)
      for (int64_t i = 0; i < kWide; ++i) panel[j * kWide + i] = i < real ? widen(weight[j * depth + k + i]) : 0.f;
    if (real == kWide) {
      panel_product(h, twell::cpu::kStride, panel, kWide, neurons, y + k, depth, nullptr, rows);
      continue;
    }
    for (int64_t r = 0; r < rows; ++r) {  // the last columns, through a row of full width
      float full[kWide] = {};
      memcpy(full, y + r * depth + k, real * sizeof(float));
      tile_product<1>(h + r * twell::cpu::kStride, 0, panel, kWide, neurons, full, 0, nullptr);
      memcpy(y + r * depth + k, full, real * sizeof(float));
    }
  }
}

}  // namespace
