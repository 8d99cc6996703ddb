// The warpgroup product D[64 x N] (+)= A[64 x 16] B[N x 16]^T for N of 16, 32, 48, 64, 96, 112, 128, 144, 160, 176,
// 192, 224 and 256. Operands are in shared memory, D is in N / 2 registers a thread: thread t of the warpgroup holds,
// for j < N / 8 and h, e of 0 and 1, in d[4 * j + 2 * h + e] the sum
// D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + e].
#pragma once

#include <type_traits>

#include "common/sm90.cuh"

namespace twell::sm90 {

// clang-format off
#define TWELL_NAMES_OF_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TWELL_NAMES_OF_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TWELL_NAMES_OF_24 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define TWELL_D_OF_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define TWELL_D_OF_16 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define TWELL_D_OF_24 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define TWELL_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TWELL_NAMES_1 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TWELL_NAMES_2 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TWELL_NAMES_3 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TWELL_D_0 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define TWELL_D_1 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define TWELL_D_2 "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define TWELL_D_3 "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define TWELL_NAMES_32_TO_47 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TWELL_D_32_TO_47 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define TWELL_NAMES_32_TO_55 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
#define TWELL_D_32_TO_55 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define TWELL_NAMES_64_TO_71 "%64, %65, %66, %67, %68, %69, %70, %71"
#define TWELL_D_64_TO_71 "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define TWELL_NAMES_64_TO_79 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define TWELL_D_64_TO_79 "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define TWELL_NAMES_64_TO_87 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87"
#define TWELL_D_64_TO_87 "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define TWELL_NAMES_96_TO_111 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define TWELL_D_96_TO_111 "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define TWELL_WGMMA(TYPE, N, NAMES, A, B, KEEP, TRANS_A, TRANS_B, ...)                                      \
  asm volatile("{\n .reg .pred keep;\n setp.ne.b32 keep, " KEEP ", 0;\n"                               \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, " A ", " B   \
               ", keep, 1, 1, " TRANS_A ", " TRANS_B ";\n}\n"                                        \
               : __VA_ARGS__ : "l"(a), "l"(b), "r"(keep), "n"(kTransposeA), "n"(kTransposeB))
#define TWELL_WGMMA_N(TYPE)                                                                             \
  if constexpr (kN == 16) {                                                                             \
    TWELL_WGMMA(TYPE, "16", TWELL_NAMES_OF_8, "%8", "%9", "%10", "%11", "%12", TWELL_D_OF_8); \
  } else if constexpr (kN == 32) {                                                                             \
    TWELL_WGMMA(TYPE, "32", TWELL_NAMES_OF_16, "%16", "%17", "%18", "%19", "%20", TWELL_D_OF_16); \
  } else if constexpr (kN == 48) {                                                                             \
    TWELL_WGMMA(TYPE, "48", TWELL_NAMES_OF_24, "%24", "%25", "%26", "%27", "%28", TWELL_D_OF_24); \
  } else if constexpr (kN == 64) {                                                                             \
    TWELL_WGMMA(TYPE, "64", TWELL_NAMES_0, "%32", "%33", "%34", "%35", "%36", TWELL_D_0);                      \
  } else if constexpr (kN == 96) {                                                                             \
    TWELL_WGMMA(TYPE, "96", TWELL_NAMES_0 ", " TWELL_NAMES_32_TO_47, "%48", "%49", "%50", "%51", "%52", TWELL_D_0, TWELL_D_32_TO_47);   \
  } else if constexpr (kN == 112) {                                                                            \
    TWELL_WGMMA(TYPE, "112", TWELL_NAMES_0 ", " TWELL_NAMES_32_TO_55, "%56", "%57", "%58", "%59", "%60", TWELL_D_0, TWELL_D_32_TO_55);   \
  } else if constexpr (kN == 128) {                                                                     \
    TWELL_WGMMA(TYPE, "128", TWELL_NAMES_0 ", " TWELL_NAMES_1, "%64", "%65", "%66", "%67", "%68",              \
                TWELL_D_0, TWELL_D_1);                                                                  \
  } else if constexpr (kN == 144) {                                                                            \
    TWELL_WGMMA(TYPE, "144", TWELL_NAMES_0 ", " TWELL_NAMES_1 ", " TWELL_NAMES_64_TO_71,                        \
                "%72", "%73", "%74", "%75", "%76", TWELL_D_0, TWELL_D_1, TWELL_D_64_TO_71);                     \
  } else if constexpr (kN == 160) {                                                                            \
    TWELL_WGMMA(TYPE, "160", TWELL_NAMES_0 ", " TWELL_NAMES_1 ", " TWELL_NAMES_64_TO_79,                        \
                "%80", "%81", "%82", "%83", "%84", TWELL_D_0, TWELL_D_1, TWELL_D_64_TO_79);                     \
  } else if constexpr (kN == 176) {                                                                            \
    TWELL_WGMMA(TYPE, "176", TWELL_NAMES_0 ", " TWELL_NAMES_1 ", " TWELL_NAMES_64_TO_87,                        \
                "%88", "%89", "%90", "%91", "%92", TWELL_D_0, TWELL_D_1, TWELL_D_64_TO_87);                     \
  } else if constexpr (kN == 192) {                                                                     \
    TWELL_WGMMA(TYPE, "192", TWELL_NAMES_0 ", " TWELL_NAMES_1 ", " TWELL_NAMES_2,                       \
                "%96", "%97", "%98", "%99", "%100", TWELL_D_0, TWELL_D_1, TWELL_D_2);                           \
  } else if constexpr (kN == 224) {                                                                     \
    TWELL_WGMMA(TYPE, "224", TWELL_NAMES_0 ", " TWELL_NAMES_1 ", " TWELL_NAMES_2 ", " TWELL_NAMES_96_TO_111,   \
                "%112", "%113", "%114", "%115", "%116", TWELL_D_0, TWELL_D_1, TWELL_D_2, TWELL_D_96_TO_111);    \
  } else {                                                                                              \
    TWELL_WGMMA(TYPE, "256", TWELL_NAMES_0 ", " TWELL_NAMES_1 ", " TWELL_NAMES_2 ", " TWELL_NAMES_3,    \
                "%128", "%129", "%130", "%131", "%132", TWELL_D_0, TWELL_D_1, TWELL_D_2, TWELL_D_3);            \
  }
// clang-format on

// keep 0: D is overwritten. kTransposeA, kTransposeB 1: A, B is MN-major. The array D may be larger than the product.
template <typename T, int kN, int kTransposeB, int kTransposeA = 0, int kSize>
__device__ __forceinline__ void wgmma(float (&d)[kSize], uint64_t a, uint64_t b, int keep) {
  static_assert(kN == 16 || kN == 32 || kN == 48 || kN == 64 || kN == 96 || kN == 112 || kN == 128 || kN == 144 || kN == 160 || kN == 176 || kN == 192 || kN == 224 || kN == 256);
  static_assert(2 * kSize >= kN);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    TWELL_WGMMA_N("bf16")
  } else {
    TWELL_WGMMA_N("f16")
  }
}
#undef TWELL_WGMMA_N
#undef TWELL_WGMMA
#undef TWELL_NAMES_OF_8
#undef TWELL_D_OF_8
#undef TWELL_NAMES_OF_16
#undef TWELL_D_OF_16
#undef TWELL_NAMES_OF_24
#undef TWELL_D_OF_24
#undef TWELL_NAMES_32_TO_47
#undef TWELL_D_32_TO_47
#undef TWELL_NAMES_64_TO_71
#undef TWELL_D_64_TO_71
#undef TWELL_NAMES_64_TO_79
#undef TWELL_D_64_TO_79
#undef TWELL_NAMES_64_TO_87
#undef TWELL_D_64_TO_87
#undef TWELL_NAMES_96_TO_111
#undef TWELL_D_96_TO_111
#undef TWELL_NAMES_0
#undef TWELL_NAMES_1
#undef TWELL_NAMES_2
#undef TWELL_NAMES_3
#undef TWELL_D_0
#undef TWELL_D_1
#undef TWELL_D_2
#undef TWELL_D_3

}  // namespace twell::sm90
