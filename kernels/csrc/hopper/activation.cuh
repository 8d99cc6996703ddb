// The activation: ReLU or its square on the gate's branch, and in some FFNs a ReLU on the up branch too. Each pair is a
// library of its own, built with these flags when a call first needs it. And the gradients of a value.
#pragma once

#include "common/convert.cuh"

namespace twell::hopper {

#ifdef TWELL_RELU2
constexpr bool kRelu2 = true;
#else
constexpr bool kRelu2 = false;
#endif
#ifdef TWELL_UP_RELU
constexpr bool kUpRelu = true;
#else
constexpr bool kUpRelu = false;
#endif

// relu, then rounding to nearest. A half stays positive where the float was positive; a bfloat16 has float's range.
template <typename T>
__device__ __forceinline__ uint32_t round_relu(float low, float high) {
  uint32_t out;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  } else {
    low = low > 0.f ? fmaxf(low, kLeast<T>) : low;
    high = high > 0.f ? fmaxf(high, kLeast<T>) : high;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  }
  return out;
}

// The value of a pre-activation before it is rounded, with the sign of the pre-activation.
__device__ __forceinline__ float activated(float z) {
  // The square of 2^-80 and more stays positive in a bfloat16; of 2^-28 and more it is exact.
  constexpr float kHardly = 0x1p-53f;
  return kRelu2 ? z * (fabsf(z) + kHardly) : z;
}

// The values of two pre-activations, rounded; positive where the pre-activation is.
template <typename T>
__device__ __forceinline__ uint32_t round_activated(float low, float high) {
  return round_relu<T>(activated(low), activated(high));
}

// By what a neuron's up value is multiplied where at most 64 rows have their gate values at hand in float32: those of
// ReLU as they are, squares as they are rounded everywhere else. pair: the rounded values, of which it is the which-th.
template <typename T>
__device__ __forceinline__ float gate_factor(float z, uint32_t pair, int which) {
  return kRelu2 ? half_of<T>(pair, which) : z;
}

// An up pre-activation after its activation; NaN stays.
__device__ __forceinline__ float up_activated(float u) { return kUpRelu ? max_nan(u, 0.f) : u; }

// Adds to each row's `used` the sum over the four lanes that have its neurons. used: of this lane; row: null if not
// counted. By whole warps.
__device__ __forceinline__ void add_used(int used, int* row, int lane) {
  used += __shfl_xor_sync(~0u, used, 1), used += __shfl_xor_sync(~0u, used, 2);
  if (lane % 4 == 0 && used > 0 && row != nullptr) atomicAdd(row, used);
}

// 1 / a of a >= 0, a unit in the last place off: what it is used for is rounded to 16 bits. Exact division takes a slow
// path where a is 0, as half of all gate values are in a dense pass. Below 2^-126 that of it; 0 above 2^126.
__device__ __forceinline__ float reciprocal(float a) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(fmaxf(a, 0x1p-126f)));
  return out;
}

// The root of a >= 0, as exact.
__device__ __forceinline__ float root(float a) {
  float out;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(a));
  return out;
}

// x with the sign of `of`, or the other one where x is negative.
__device__ __forceinline__ float times_sign(float x, float of) {
  return __uint_as_float(__float_as_uint(x) ^ (__float_as_uint(of) & 0x80000000u));
}

// The gradients of a value's up value and of its gate's pre-activation. Both are 0 where the gate value g is 0, and
// with it h.
struct ValueGradients {
  float du, dg;
  // h: the hidden value; dh: its gradient without the one of l1; l1: the gradient of |h|
  __device__ __forceinline__ ValueGradients(float g, float h, float dh, float l1) {
    if (h != 0.f) dh += times_sign(l1, h);
    float slope = h * reciprocal(g);  // of h by the gate's pre-activation: the up value
    if constexpr (kRelu2) slope *= 2.f * root(g);
    du = dh * g, dg = dh * slope;
  }
};

}  // namespace twell::hopper
