// Of mx_medium_m.cuh: the tensor core's products of e4m3.
#pragma once

#include "mx_common.cuh"

namespace dgmoe {
namespace mx_medium_m {

// Sets d to the product of 32 columns: 64 rows, from registers, and kRows rows, in shared memory. It
// is under way until waited for.
#define DGMOE_8(i)                                                                            \
  "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), \
      "=f"(d[i + 6]), "=f"(d[i + 7])
#define DGMOE_16(i) DGMOE_8(i), DGMOE_8(i + 8)
#define DGMOE_SUMS_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define DGMOE_SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define DGMOE_SUMS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define DGMOE_SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
// What follows the sums: the numbers of the operands below them.
#define DGMOE_MULTIPLY(rows, sums, left0, left1, left2, left3, right_, ...)                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0;\n\twgmma.mma_async.sync.aligned.m64n" rows \
               "k32.f32.e4m3.e4m3 {" sums "}, {" left0 ", " left1 ", " left2 ", " left3        \
               "}, " right_ ", p, 1, 1;}"                                                      \
               : __VA_ARGS__                                                                   \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right)            \
               : "memory")

template <int kRows>
__device__ __forceinline__ void multiply(float (&d)[kRows / 2], const uint32_t (&left)[4],
                                         uint64_t right) {
  static_assert(kRows == 32 || kRows == 48 || kRows == 64 || kRows == 80);
  if constexpr (kRows == 32) {
    DGMOE_MULTIPLY("32", DGMOE_SUMS_0, "%16", "%17", "%18", "%19", "%20", DGMOE_16(0));
  } else if constexpr (kRows == 48) {
    DGMOE_MULTIPLY("48", DGMOE_SUMS_0 DGMOE_SUMS_16, "%24", "%25", "%26", "%27", "%28", DGMOE_16(0),
                   DGMOE_8(16));
  } else if constexpr (kRows == 64) {
    DGMOE_MULTIPLY("64", DGMOE_SUMS_0 DGMOE_SUMS_16 DGMOE_SUMS_24, "%32", "%33", "%34", "%35",
                   "%36", DGMOE_16(0), DGMOE_16(16));
  } else {
    DGMOE_MULTIPLY("80", DGMOE_SUMS_0 DGMOE_SUMS_16 DGMOE_SUMS_24 DGMOE_SUMS_32, "%40", "%41",
                   "%42", "%43", "%44", DGMOE_16(0), DGMOE_16(16), DGMOE_8(32));
  }
}

#undef DGMOE_MULTIPLY
#undef DGMOE_SUMS_32
#undef DGMOE_SUMS_24
#undef DGMOE_SUMS_16
#undef DGMOE_SUMS_0
#undef DGMOE_16
#undef DGMOE_8

}  // namespace mx_medium_m
}  // namespace dgmoe
