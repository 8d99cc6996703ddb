// One vector register of floats, at whatever width the compiler was told of.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#ifdef TWELL_X86
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRegisters = 16;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

using bf16 = uint16_t;  // its bits
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float LooseVec __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));  // what comparisons give: 0 or -1
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef bf16 LooseHalves __attribute__((vector_size(kLanes * 2), aligned(2)));

inline float widen(float value) { return value; }
inline float widen(bf16 value) {
  const uint32_t bits = uint32_t(value) << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

inline Vec load(const float* from) { return *reinterpret_cast<const LooseVec*>(from); }
inline Vec load(const bf16* from) {
  const Bits bits = __builtin_convertvector(*reinterpret_cast<const LooseHalves*>(from), Bits) << 16;
  Vec wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}
inline void store(float* to, Vec value) { *reinterpret_cast<LooseVec*>(to) = value; }
inline Vec all(float value) { return Vec{} + value; }

// To the nearest bfloat16, ties to even. Infinities and NaNs stay what they are.
inline Vec rounded(Vec value) {
  Bits bits;
  memcpy(&bits, &value, sizeof bits);
  const Bits near = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  bits = (bits & 0x7f800000u) == 0x7f800000u ? bits : near;
  memcpy(&value, &bits, sizeof bits);
  return value;
}

inline float sum_of_lanes(Vec value) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += value[lane];
  return sum;
}

// The first `count` lanes, the others zero: the end of a row.
template <class T>
inline Vec load_part(const T* from, int64_t count) {
  T lanes[kLanes] = {};
  memcpy(lanes, from, count * sizeof(T));
  return load(lanes);
}

// Lane `o` of the sum of halves: both vectors hold parts of `width` lanes, the result parts half as wide.
constexpr int half_of(int o, int width, bool high) {
  const int half = width / 2, in_vector = kLanes / 2, source = o / in_vector, rest = o % in_vector;
  return source * kLanes + rest / half * width + rest % half + (high ? half : 0);
}
template <int kWidth, int... kOut>
inline Vec add_halves(Vec a, Vec b, std::integer_sequence<int, kOut...>) {
  return __builtin_shufflevector(a, b, half_of(kOut, kWidth, false)...) +
         __builtin_shufflevector(a, b, half_of(kOut, kWidth, true)...);
}

// Sums of four vectors over their lanes, always by the same tree.
inline void sums_of_4(const Vec* v, float* out) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
  Vec parts =
      add_halves<kLanes / 2>(add_halves<kLanes>(v[0], v[1], lanes), add_halves<kLanes>(v[2], v[3], lanes), lanes);
  if constexpr (kLanes >= 8) parts = add_halves<kLanes / 4>(parts, parts, lanes);
  if constexpr (kLanes >= 16) parts = add_halves<kLanes / 8>(parts, parts, lanes);
  float lane[kLanes];
  store(lane, parts);
  memcpy(out, lane, 16);
}

// Writes the positions, from `base` on, of the lanes above zero, and returns how many. Up to 16 more are overwritten.
inline int64_t append_positive(Vec value, int64_t base, uint16_t* out) {
#if defined(__AVX512F__)
  const __mmask16 mask = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(value), _mm512_setzero_ps(), _CMP_GT_OQ);
  if (!mask) return 0;
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i at = _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(lane, _mm512_set1_epi32(int(base))));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(at));
  return __builtin_popcount(mask);
#elif defined(__AVX2__)
  const __m256 above = _mm256_cmp_ps(reinterpret_cast<__m256>(value), _mm256_setzero_ps(), _CMP_GT_OQ);
  int64_t count = 0;
  for (unsigned mask = _mm256_movemask_ps(above); mask; mask &= mask - 1) out[count++] = base + __builtin_ctz(mask);
  return count;
#else
  int64_t count = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    if (value[lane] > 0) out[count++] = uint16_t(base + lane);
  return count;
#endif
}

}  // namespace
