// Of mx_large_m.cuh: how values become bf16, and their products.
#pragma once

#include "mx_common.cuh"

namespace dgmoe {
namespace mx_large_m {

__device__ __forceinline__ uint32_t scaled(uint32_t pair, uint32_t factor) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor));
  return product;
}

// Values' bits as bf16 are 2^-120 (e4m3) or 2^-126 (e2m1) of them, subnormal ones included. A
// factor 2^(e - 127 + 111) then leaves 2^-9 or 2^-15 of the scaled value.
constexpr uint32_t kBias = 111u * 0x01010101u;
constexpr uint32_t kLowest = 16u * 0x01010101u;
constexpr uint32_t kSigns = 0x80008000u;

// bf16 pairs of bytes 0 and 2, and of bytes 1 and 3. `largest` gathers magnitudes, in 16 bits each.
__device__ __forceinline__ void widen_e4m3(uint32_t word, uint32_t factor, uint32_t& even,
                                           uint32_t& odd, uint32_t& largest) {
  constexpr uint32_t kMagnitudes = 0x07f007f0u;
  const uint32_t low = word << 4 & kMagnitudes;
  const uint32_t high = word >> 4 & kMagnitudes;
  largest = __vimax3_u16x2(largest, low, high);
  even = scaled(low | (word << 8 & kSigns), factor);
  odd = scaled(high | (word & kSigns), factor);
}
__device__ __forceinline__ bool has_nan(uint32_t largest) {
  return ((largest + 0x00100010u) & 0x08000800u) != 0;
}

// bf16 pairs of codes i and i + 4, and of codes i + 1 and i + 5, of eight in a word.
template <int i>
__device__ __forceinline__ void widen_e2m1(uint32_t word, uint32_t factor, uint32_t& even,
                                           uint32_t& odd) {
  constexpr uint32_t kMagnitudes = 0x01c001c0u;
  if constexpr (i == 0) {
    even = scaled((word << 6 & kMagnitudes) | (word << 12 & kSigns), factor);
    odd = scaled((word << 2 & kMagnitudes) | (word << 8 & kSigns), factor);
  } else {
    even = scaled((word >> 2 & kMagnitudes) | (word << 4 & kSigns), factor);
    odd = scaled((word >> 6 & kMagnitudes) | (word & kSigns), factor);
  }
}

// Whether a word of scales holds one that a factor cannot stand for.
__device__ __forceinline__ bool out_of_range(uint32_t word) {
  return ((word - kLowest) & 0x80808080u) != 0;
}
// bf16 2^(e - 16) twice, for the byte that the selector takes.
__device__ __forceinline__ uint32_t factor_of(uint32_t word, uint32_t selector) {
  uint32_t twice;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(twice) : "r"(word + kBias), "r"(selector));
  return twice >> 1;
}
__device__ __forceinline__ uint32_t selector_of(int byte) { return 0x0404u + byte * 0x1010u; }

// Of a scale out of range: whether the values below it need it.
__device__ __forceinline__ bool needs_scale(uint32_t word, int byte, uint32_t magnitudes) {
  const uint32_t e = word >> 8 * byte & 255u;
  return e > 143 || (e < 16 && magnitudes != 0);
}

template <bool kFp4>
struct Raw {
  uint32_t words[kFp4 ? 2 : 4];

  __device__ __forceinline__ void load(uint32_t shared) {
    if constexpr (kFp4) {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                   : "=r"(words[0]), "=r"(words[1])
                   : "r"(shared)
                   : "memory");
    } else {
      load_words(words, shared);
    }
  }
  __device__ __forceinline__ uint32_t magnitudes() const {
    uint32_t all = words[0] | words[1];
    if constexpr (!kFp4) all |= words[2] | words[3];
    return all & 0x7f7f7f7fu;
  }
};

// Of one row of the weight: its words of the left operand of product kProduct of a step's four, of
// its first 8 rows or its last.
template <bool kFp4, int kProduct, int kHalf>
__device__ __forceinline__ void widen_weights(const Raw<kFp4>& raw, uint32_t factor,
                                              uint32_t (&left)[4], uint32_t& largest) {
  if constexpr (kFp4) {
    widen_e2m1<kProduct % 2 * 2>(raw.words[kProduct / 2], factor, left[kHalf], left[2 + kHalf]);
  } else {
    widen_e4m3(raw.words[kProduct], factor, left[kHalf], left[2 + kHalf], largest);
  }
}

// Adds 16 columns' product of 64 rows, from registers, and kRows rows, in shared memory, to d. It is
// under way until waited for.
#define DGMOE_8(i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define DGMOE_16(i) DGMOE_8(i), DGMOE_8(i + 8)
#define DGMOE_SUMS_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define DGMOE_SUMS_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DGMOE_SUMS_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define DGMOE_SUMS_48 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DGMOE_HALF_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define DGMOE_SUMS_64 DGMOE_HALF_64 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define DGMOE_SUMS_80 \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define DGMOE_SUMS_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define DGMOE_SUMS_112                                                                           \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
// What follows the sums: the numbers of the operands below them.
#define DGMOE_MULTIPLY(rows, sums, left0, left1, left2, left3, right_, ...)                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" rows "k16.f32.bf16.bf16 {" sums "}, {" left0 \
               ", " left1 ", " left2 ", " left3 "}, " right_ ", 1, 1, 1, 0;"                    \
               : __VA_ARGS__                                                                    \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right))

template <int kRows>
__device__ __forceinline__ void multiply(float (&d)[kRows / 2], const uint32_t (&left)[4],
                                         uint64_t right) {
  static_assert(kRows == 64 || kRows == 128 || kRows == 144 || kRows == 192 || kRows == 256);
  if constexpr (kRows == 64) {
    DGMOE_MULTIPLY("64", DGMOE_SUMS_0 DGMOE_SUMS_16, "%32", "%33", "%34", "%35", "%36", DGMOE_16(0),
                   DGMOE_16(16));
  } else if constexpr (kRows == 128) {
    DGMOE_MULTIPLY("128", DGMOE_SUMS_0 DGMOE_SUMS_16 DGMOE_SUMS_32 DGMOE_SUMS_48, "%64", "%65",
                   "%66", "%67", "%68", DGMOE_16(0), DGMOE_16(16), DGMOE_16(32), DGMOE_16(48));
  } else if constexpr (kRows == 144) {
    DGMOE_MULTIPLY("144", DGMOE_SUMS_0 DGMOE_SUMS_16 DGMOE_SUMS_32 DGMOE_SUMS_48 DGMOE_HALF_64,
                   "%72", "%73", "%74", "%75", "%76", DGMOE_16(0), DGMOE_16(16), DGMOE_16(32),
                   DGMOE_16(48), DGMOE_8(64));
  } else if constexpr (kRows == 192) {
    DGMOE_MULTIPLY(
        "192", DGMOE_SUMS_0 DGMOE_SUMS_16 DGMOE_SUMS_32 DGMOE_SUMS_48 DGMOE_SUMS_64 DGMOE_SUMS_80,
        "%96", "%97", "%98", "%99", "%100", DGMOE_16(0), DGMOE_16(16), DGMOE_16(32), DGMOE_16(48),
        DGMOE_16(64), DGMOE_16(80));
  } else {
    DGMOE_MULTIPLY("256",
                   DGMOE_SUMS_0 DGMOE_SUMS_16 DGMOE_SUMS_32 DGMOE_SUMS_48 DGMOE_SUMS_64
                       DGMOE_SUMS_80 DGMOE_SUMS_96 DGMOE_SUMS_112,
                   "%128", "%129", "%130", "%131", "%132", DGMOE_16(0), DGMOE_16(16), DGMOE_16(32),
                   DGMOE_16(48), DGMOE_16(64), DGMOE_16(80), DGMOE_16(96), DGMOE_16(112));
  }
}

#undef DGMOE_MULTIPLY
#undef DGMOE_SUMS_112
#undef DGMOE_SUMS_96
#undef DGMOE_SUMS_80
#undef DGMOE_SUMS_64
#undef DGMOE_HALF_64
#undef DGMOE_SUMS_48
#undef DGMOE_SUMS_32
#undef DGMOE_SUMS_16
#undef DGMOE_SUMS_0
#undef DGMOE_16
#undef DGMOE_8

}  // namespace mx_large_m
}  // namespace dgmoe
