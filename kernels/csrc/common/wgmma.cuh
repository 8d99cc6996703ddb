// The warpgroup product D[64 x N] (+)= A[64 x 16] B[N x 16]^T for N of 16, 32, 48, 64, 96, 112, 128, 144, 160, 176,
// 192, 224 and 256. Operands are in shared memory, D is in N / 2 registers a thread: thread t of the warpgroup holds,
// for j < N / 8 and h, e of 0 and 1, in d[4 * j + 2 * h + e] the sum
// D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + e].
#pragma once

#include <type_traits>

#include "common/sm90.cuh"

namespace twell::sm90 {

// The names of the first registers of D in an instruction, and the operands that they stand for, by how many they are.
#define TWELL_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TWELL_NAMES_16 TWELL_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TWELL_NAMES_24 TWELL_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TWELL_NAMES_32 TWELL_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TWELL_NAMES_40 TWELL_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TWELL_NAMES_48 TWELL_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TWELL_NAMES_56 TWELL_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TWELL_NAMES_64 TWELL_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TWELL_NAMES_72 TWELL_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TWELL_NAMES_80 TWELL_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TWELL_NAMES_88 TWELL_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TWELL_NAMES_96 TWELL_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TWELL_NAMES_104 TWELL_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TWELL_NAMES_112 TWELL_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TWELL_NAMES_120 TWELL_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TWELL_NAMES_128 TWELL_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define TWELL_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TWELL_EIGHT(i) TWELL_FOUR(i), TWELL_FOUR(i + 4)
#define TWELL_D_8 TWELL_EIGHT(0)
#define TWELL_D_16 TWELL_D_8, TWELL_EIGHT(8)
#define TWELL_D_24 TWELL_D_16, TWELL_EIGHT(16)
#define TWELL_D_32 TWELL_D_24, TWELL_EIGHT(24)
#define TWELL_D_40 TWELL_D_32, TWELL_EIGHT(32)
#define TWELL_D_48 TWELL_D_40, TWELL_EIGHT(40)
#define TWELL_D_56 TWELL_D_48, TWELL_EIGHT(48)
#define TWELL_D_64 TWELL_D_56, TWELL_EIGHT(56)
#define TWELL_D_72 TWELL_D_64, TWELL_EIGHT(64)
#define TWELL_D_80 TWELL_D_72, TWELL_EIGHT(72)
#define TWELL_D_88 TWELL_D_80, TWELL_EIGHT(80)
#define TWELL_D_96 TWELL_D_88, TWELL_EIGHT(88)
#define TWELL_D_104 TWELL_D_96, TWELL_EIGHT(96)
#define TWELL_D_112 TWELL_D_104, TWELL_EIGHT(104)
#define TWELL_D_120 TWELL_D_112, TWELL_EIGHT(112)
#define TWELL_D_128 TWELL_D_120, TWELL_EIGHT(120)

// The product for N, whose other operands follow its N / 2 registers: A is the number of the first of them.
#define TWELL_WGMMA_OF(TYPE, N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE
#define TWELL_WGMMA(TYPE, N, A, B, KEEP, TRANS_A, TRANS_B)                                                           \
  if constexpr (kN == N) {                                                                                           \
    asm volatile("{ .reg .pred keep; setp.ne.b32 keep, %" #KEEP ", 0; " TWELL_WGMMA_OF(TYPE, N) " {" TWELL_NAMES_##A \
                 "}, %" #A ", %" #B ", keep, 1, 1, %" #TRANS_A ", %" #TRANS_B "; }"                                  \
                 : TWELL_D_##A                                                                                       \
                 : "l"(a), "l"(b), "r"(keep), "n"(kTransposeA), "n"(kTransposeB));                                   \
  }
#define TWELL_WGMMA_N(TYPE)                        \
  TWELL_WGMMA(TYPE, 16, 8, 9, 10, 11, 12);         \
  TWELL_WGMMA(TYPE, 32, 16, 17, 18, 19, 20);       \
  TWELL_WGMMA(TYPE, 48, 24, 25, 26, 27, 28);       \
  TWELL_WGMMA(TYPE, 64, 32, 33, 34, 35, 36);       \
  TWELL_WGMMA(TYPE, 96, 48, 49, 50, 51, 52);       \
  TWELL_WGMMA(TYPE, 112, 56, 57, 58, 59, 60);      \
  TWELL_WGMMA(TYPE, 128, 64, 65, 66, 67, 68);      \
  TWELL_WGMMA(TYPE, 144, 72, 73, 74, 75, 76);      \
  TWELL_WGMMA(TYPE, 160, 80, 81, 82, 83, 84);      \
  TWELL_WGMMA(TYPE, 176, 88, 89, 90, 91, 92);      \
  TWELL_WGMMA(TYPE, 192, 96, 97, 98, 99, 100);     \
  TWELL_WGMMA(TYPE, 224, 112, 113, 114, 115, 116); \
  TWELL_WGMMA(TYPE, 256, 128, 129, 130, 131, 132);

// keep 0: D is overwritten. kTransposeA, kTransposeB 1: A, B is MN-major. The array D may be larger than the product.
template <typename T, int kN, int kTransposeB, int kTransposeA = 0, int kSize>
__device__ __forceinline__ void wgmma(float (&d)[kSize], uint64_t a, uint64_t b, int keep) {
  static_assert(kN == 16 || kN == 32 || kN == 48 || kN == 64 || kN == 96 || kN == 112 || kN == 128 || kN == 144 ||
                kN == 160 || kN == 176 || kN == 192 || kN == 224 || kN == 256);
  static_assert(2 * kSize >= kN);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    TWELL_WGMMA_N("bf16")
  } else {
    TWELL_WGMMA_N("f16")
  }
}
#undef TWELL_WGMMA_N
#undef TWELL_WGMMA
#undef TWELL_WGMMA_OF

}  // namespace twell::sm90
