// Numbers of 16 bits, bfloat16 and half, and their conversion from and to float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace twell {

// The value in the low (0) or high (1) half of a word.
template <typename T>
__device__ __forceinline__ float half_of(uint32_t pair, int which) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __uint_as_float(which ? pair & 0xffff0000u : pair << 16);
  else
    return __half2float(__ushort_as_half(static_cast<unsigned short>(which ? pair >> 16 : pair)));
}

template <typename T>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  uint32_t out;
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// The sums of two pairs' halves, rounded.
template <typename T>
__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
  return round_pair<T>(half_of<T>(a, 0) + half_of<T>(b, 0), half_of<T>(a, 1) + half_of<T>(b, 1));
}
template <typename T>
__device__ __forceinline__ uint4 add_pairs(uint4 a, uint4 b) {
  return make_uint4(add_pairs<T>(a.x, b.x), add_pairs<T>(a.y, b.y), add_pairs<T>(a.z, b.z), add_pairs<T>(a.w, b.w));
}

// All ones in each half of a pair that is positive, all zeros in the other halves.
template <typename T>
__device__ __forceinline__ uint32_t positive_halves(uint32_t pair) {
  uint32_t out;
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(0));
  else
    asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(0));
  return out;
}

// The same for each half that is not zero; NaN is not zero.
template <typename T>
__device__ __forceinline__ uint32_t nonzero_halves(uint32_t pair) {
  uint32_t out;
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("set.neu.u32.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(0));
  else
    asm("set.neu.u32.f16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(0));
  return out;
}

// Adds to `broken`, a pair that starts as zeros, NaN in each half where `pair` is not finite: inf or NaN times 0 is
// NaN, and NaN persists.
template <typename T>
__device__ __forceinline__ uint32_t break_pair(uint32_t broken, uint32_t pair) {
  uint32_t out;
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(pair), "r"(0), "r"(broken));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(pair), "r"(0), "r"(broken));
  return out;
}

constexpr uint32_t kNanPair = 0x7fff7fffu;  // NaN in both halves, in either type

template <typename T>
constexpr float kLeast = std::is_same_v<T, __nv_bfloat16> ? 0x1p-133f : 0x1p-24f;  // the least positive number of T

// Whether a magnitude stays finite when it is rounded to T; false for NaN.
template <typename T>
__device__ __forceinline__ bool stays_finite(float magnitude) {
  // the least number that rounds to inf
  constexpr float kBound = std::is_same_v<T, __nv_bfloat16> ? 0x1.ffp127f : 65520.f;
  return magnitude < kBound;
}

__device__ __forceinline__ float max_nan(float a, float b) {  // NaN if either is NaN
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

}  // namespace twell
