// The wgmma instructions of this folder, by their N: A from registers, B from shared memory, fp32
// accumulators. Each is pending until it was committed and waited for.
#pragma once

#include <cstdint>

namespace dgmoe {
namespace sm90 {

#define DGMOE_F4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define DGMOE_F8(c, i) DGMOE_F4(c, i), DGMOE_F4(c, i + 4)
#define DGMOE_F16(c, i) DGMOE_F8(c, i), DGMOE_F8(c, i + 8)
#define DGMOE_F32(c, i) DGMOE_F16(c, i), DGMOE_F16(c, i + 16)
#define DGMOE_F64(c, i) DGMOE_F32(c, i), DGMOE_F32(c, i + 32)
#define DGMOE_D0 "%0, %1, %2, %3"
#define DGMOE_D4 ", %4, %5, %6, %7"
#define DGMOE_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define DGMOE_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define DGMOE_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define DGMOE_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define DGMOE_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define DGMOE_D48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DGMOE_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define DGMOE_D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define DGMOE_D80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define DGMOE_D96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define DGMOE_D112                                                                               \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
// The first N accumulators.
#define DGMOE_D_TO_16 DGMOE_D0 DGMOE_D4 DGMOE_D8
#define DGMOE_D_TO_32 DGMOE_D_TO_16 DGMOE_D16 DGMOE_D24
#define DGMOE_D_TO_64 DGMOE_D_TO_32 DGMOE_D32 DGMOE_D40 DGMOE_D48
#define DGMOE_D_TO_96 DGMOE_D_TO_64 DGMOE_D64 DGMOE_D72 DGMOE_D80

// a0 .. a3 and b_ are the numbers of the operands after the accumulators. Scale-D 0: d is written,
// not added to.
#define DGMOE_E4M3(n, d_, a0, a1, a2, a3, b_)                                  \
  "{.reg .pred p; setp.ne.b32 p, 0, 0;\n\twgmma.mma_async.sync.aligned.m64n" n \
  "k32.f32.e4m3.e4m3 {" d_ "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b_ ", p, 1, 1;}"
#define DGMOE_BF16(n, d_, a0, a1, a2, a3, b_)                                                      \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" d_ "}, {" a0 ", " a1 ", " a2 ", " a3 \
  "}, " b_ ", 1, 1, 1, 0;"
#define DGMOE_AB "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

// d = a @ b^T of 64 x kN x 32 in e4m3.
template <int kN>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kN == 8 || kN == 16 || kN == 32 || kN == 48 || kN == 64 || kN == 80);
  if constexpr (kN == 8) {
    asm volatile(DGMOE_E4M3("8", DGMOE_D0, "%4", "%5", "%6", "%7", "%8")
                 : DGMOE_F4("=&f", 0)
                 : DGMOE_AB);
  } else if constexpr (kN == 16) {
    asm volatile(DGMOE_E4M3("16", DGMOE_D0 DGMOE_D4, "%8", "%9", "%10", "%11", "%12")
                 : DGMOE_F8("=&f", 0)
                 : DGMOE_AB);
  } else if constexpr (kN == 32) {
    asm volatile(DGMOE_E4M3("32", DGMOE_D_TO_16, "%16", "%17", "%18", "%19", "%20")
                 : DGMOE_F16("=f", 0)
                 : DGMOE_AB
                 : "memory");
  } else if constexpr (kN == 48) {
    asm volatile(DGMOE_E4M3("48", DGMOE_D_TO_16 DGMOE_D16, "%24", "%25", "%26", "%27", "%28")
                 : DGMOE_F16("=f", 0), DGMOE_F8("=f", 16)
                 : DGMOE_AB
                 : "memory");
  } else if constexpr (kN == 64) {
    asm volatile(DGMOE_E4M3("64", DGMOE_D_TO_32, "%32", "%33", "%34", "%35", "%36")
                 : DGMOE_F32("=f", 0)
                 : DGMOE_AB
                 : "memory");
  } else {
    asm volatile(DGMOE_E4M3("80", DGMOE_D_TO_32 DGMOE_D32, "%40", "%41", "%42", "%43", "%44")
                 : DGMOE_F32("=f", 0), DGMOE_F8("=f", 32)
                 : DGMOE_AB
                 : "memory");
  }
}

// d += a @ b^T of 64 x kN x 16 in bf16.
template <int kN>
__device__ __forceinline__ void wgmma_bf16(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kN == 64 || kN == 128 || kN == 144 || kN == 192 || kN == 256);
  if constexpr (kN == 64) {
    asm volatile(DGMOE_BF16("64", DGMOE_D_TO_32, "%32", "%33", "%34", "%35", "%36")
                 : DGMOE_F32("+f", 0)
                 : DGMOE_AB);
  } else if constexpr (kN == 128) {
    asm volatile(DGMOE_BF16("128", DGMOE_D_TO_64, "%64", "%65", "%66", "%67", "%68")
                 : DGMOE_F64("+f", 0)
                 : DGMOE_AB);
  } else if constexpr (kN == 144) {
    asm volatile(DGMOE_BF16("144", DGMOE_D_TO_64 DGMOE_D64, "%72", "%73", "%74", "%75", "%76")
                 : DGMOE_F64("+f", 0), DGMOE_F8("+f", 64)
                 : DGMOE_AB);
  } else if constexpr (kN == 192) {
    asm volatile(DGMOE_BF16("192", DGMOE_D_TO_96, "%96", "%97", "%98", "%99", "%100")
                 : DGMOE_F64("+f", 0), DGMOE_F32("+f", 64)
                 : DGMOE_AB);
  } else {
    asm volatile(DGMOE_BF16("256", DGMOE_D_TO_96 DGMOE_D96 DGMOE_D112, "%128", "%129", "%130",
                            "%131", "%132")
                 : DGMOE_F64("+f", 0), DGMOE_F64("+f", 64)
                 : DGMOE_AB);
  }
}

#undef DGMOE_AB
#undef DGMOE_BF16
#undef DGMOE_E4M3
#undef DGMOE_D_TO_96
#undef DGMOE_D_TO_64
#undef DGMOE_D_TO_32
#undef DGMOE_D_TO_16
#undef DGMOE_D112
#undef DGMOE_D96
#undef DGMOE_D80
#undef DGMOE_D72
#undef DGMOE_D64
#undef DGMOE_D48
#undef DGMOE_D40
#undef DGMOE_D32
#undef DGMOE_D24
#undef DGMOE_D16
#undef DGMOE_D8
#undef DGMOE_D4
#undef DGMOE_D0
#undef DGMOE_F64
#undef DGMOE_F32
#undef DGMOE_F16
#undef DGMOE_F8
#undef DGMOE_F4

}  // namespace sm90
}  // namespace dgmoe
