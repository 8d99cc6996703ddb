// Instructions of every NVIDIA GPU from sm_80 on, one thin function each: asynchronous copies into shared memory, loads
// of 8 x 8 matrices from it, and the warp's matrix product. No torch, no policy.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#include "common/smem.cuh"

namespace twell::sm80 {

// Copies 16 bytes; unless `inside`, writes zeros and reads nothing.
__device__ __forceinline__ void copy_16(uint32_t smem, const void* global, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(inside ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// A load that returns zeros, and reads nothing, unless `inside`; many of them are in flight at once.
__device__ __forceinline__ uint4 load_16(const void* global, bool inside) {
  uint4 v;
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %5, 0;\n"
      " mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
      " @p ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n}\n"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(global), "r"(static_cast<int>(inside)));
  return v;
}

// Loads, likewise, and stores of one piece, from and to the L2, that may meet those of other threads of the GPU; alone
// they put nothing else in order.
__device__ __forceinline__ uint32_t load_relaxed_4(const void* global, bool inside) {
  uint32_t v;
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %2, 0;\n mov.b32 %0, 0;\n @p ld.relaxed.gpu.global.b32 %0, [%1];\n}\n"
      : "=&r"(v)
      : "l"(global), "r"(static_cast<int>(inside))
      : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_relaxed_8(const void* global, bool inside) {
  uint64_t v;
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %2, 0;\n mov.b64 %0, 0;\n @p ld.relaxed.gpu.global.b64 %0, [%1];\n}\n"
      : "=&l"(v)
      : "l"(global), "r"(static_cast<int>(inside))
      : "memory");
  return make_uint2(static_cast<uint32_t>(v), static_cast<uint32_t>(v >> 32));
}
__device__ __forceinline__ void store_relaxed(uint32_t* global, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(global), "r"(v) : "memory");
}
__device__ __forceinline__ void store_relaxed(uint2* global, uint2 v) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(global), "l"(static_cast<uint64_t>(v.y) << 32 | v.x)
               : "memory");
}

// Loads four matrices of 8 rows of 16 bytes. Lane 8 i + j passes the address of row j of matrix i, and receives the
// pair 2 (lane % 4) of row lane / 4 of each (transposed: of column lane / 4).
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t smem) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}

// D[16 x 8] += A[16 x 16] B[8 x 16]^T: d[2 h + e] is D[lane / 4 + 8 h][2 (lane % 4) + e].
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace twell::sm80
