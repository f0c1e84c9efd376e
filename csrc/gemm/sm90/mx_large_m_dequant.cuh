// Of sm90_mx_large_m: e4m3 and e2m1 values times their UE8M0 scale, exactly, as bf16.
#pragma once

#include "mx_common.cuh"

namespace dgmoe {
namespace sm90 {
namespace mx_large_m {

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t pair, uint32_t factor) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor));
  return product;
}

// The bits of a value, shifted into those of bf16, are 2^-120 (e4m3) or 2^-126 (e2m1) of it,
// subnormal ones included. A factor of 2^(scale - 127 + 111) then leaves 2^-9 or 2^-15 of the
// scaled value.
constexpr uint32_t kBias = 111u * 0x01010101u;
constexpr uint32_t kSmallestScale = 16u * 0x01010101u;
constexpr uint32_t kSigns = 0x80008000u;

// bf16 pairs of bytes 0 and 2, and of bytes 1 and 3. `largest` gathers the largest magnitude, in 16
// bits each.
__device__ __forceinline__ void dequant_e4m3(uint32_t word, uint32_t factor, uint32_t& even,
                                             uint32_t& odd, uint32_t& largest) {
  constexpr uint32_t kMagnitudes = 0x07f007f0u;
  const uint32_t low = word << 4 & kMagnitudes;
  const uint32_t high = word >> 4 & kMagnitudes;
  largest = __vimax3_u16x2(largest, low, high);
  even = mul_bf16x2(low | (word << 8 & kSigns), factor);
  odd = mul_bf16x2(high | (word & kSigns), factor);
}
__device__ __forceinline__ bool has_nan(uint32_t largest) {
  return ((largest + 0x00100010u) & 0x08000800u) != 0;
}

// bf16 pairs of codes i and i + 4, and of codes i + 1 and i + 5, of eight in a word.
template <int i>
__device__ __forceinline__ void dequant_e2m1(uint32_t word, uint32_t factor, uint32_t& even,
                                             uint32_t& odd) {
  constexpr uint32_t kMagnitudes = 0x01c001c0u;
  if constexpr (i == 0) {
    even = mul_bf16x2((word << 6 & kMagnitudes) | (word << 12 & kSigns), factor);
    odd = mul_bf16x2((word << 2 & kMagnitudes) | (word << 8 & kSigns), factor);
  } else {
    even = mul_bf16x2((word >> 2 & kMagnitudes) | (word << 4 & kSigns), factor);
    odd = mul_bf16x2((word >> 6 & kMagnitudes) | (word & kSigns), factor);
  }
}

// Whether a word of scales has one outside of [2^-111, 2^16], for which there is no factor.
__device__ __forceinline__ bool out_of_range(uint32_t word) {
  return ((word - kSmallestScale) & 0x80808080u) != 0;
}
// bf16 2^(scale - 16) twice, of the scale that the selector of byte permutation names.
__device__ __forceinline__ uint32_t factor_of(uint32_t word, uint32_t selector) {
  uint32_t twice;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(twice) : "r"(word + kBias), "r"(selector));
  return twice >> 1;
}
__device__ __forceinline__ uint32_t selector_of(int byte) { return 0x0404u + byte * 0x1010u; }

// Whether a scale out of range matters, given the values that it covers: a small one of zeros does
// not.
__device__ __forceinline__ bool needs_scale(uint32_t word, int byte, uint32_t magnitudes) {
  const uint32_t e = word >> 8 * byte & 255u;
  return e > 143 || (e < 16 && magnitudes != 0);
}

// A lane's packed values of a row of the weight in a K block: 16 columns.
template <bool kFp4>
struct PackedWeights {
  uint32_t words[kFp4 ? 2 : 4];

  __device__ __forceinline__ void load(uint32_t smem) {
    if constexpr (kFp4) {
      ld_shared_v2_b32(words, smem);
    } else {
      ld_shared_v4_b32(words, smem);
    }
  }
  __device__ __forceinline__ uint32_t magnitudes() const {
    uint32_t all = words[0] | words[1];
    if constexpr (!kFp4) all |= words[2] | words[3];
    return all & 0x7f7f7f7fu;
  }
};

// Dequantises what one row of the weight has in the fragment of wgmma kWgmma, of four in a K block:
// row r (kHalf 0) or r + 8 (kHalf 1) of the lane.
template <bool kFp4, int kWgmma, int kHalf>
__device__ __forceinline__ void dequant_fragment(const PackedWeights<kFp4>& packed, uint32_t factor,
                                                 uint32_t (&fragment)[4], uint32_t& largest) {
  if constexpr (kFp4) {
    dequant_e2m1<kWgmma % 2 * 2>(packed.words[kWgmma / 2], factor, fragment[kHalf],
                                 fragment[2 + kHalf]);
  } else {
    dequant_e4m3(packed.words[kWgmma], factor, fragment[kHalf], fragment[2 + kHalf], largest);
  }
}

}  // namespace mx_large_m
}  // namespace sm90
}  // namespace dgmoe
