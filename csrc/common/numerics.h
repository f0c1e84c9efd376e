// Scalar codecs and functions that every backend shares, bit for bit: bf16, e4m3, e2m1, UE8M0, group
// scales, exp, tanh, SiLU and the scores of routers. No torch include, so that a test can bind them
// alone. Only explicit fused multiply-adds; build with contraction off (-ffp-contract=off,
// -fmad=false), otherwise host and device stop agreeing.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define DGMOE_HD __host__ __device__ __forceinline__
#else
#define DGMOE_HD inline __attribute__((always_inline))
#endif

namespace dgmoe {

constexpr float kE4m3Max = 448.0f;
constexpr float kMinAmax = 1e-10f;  // floor of a group's amax: a zero group gets a finite scale
constexpr uint32_t kInfBits = 0x7f800000u;
constexpr uint32_t kNanBits = 0x7fc00000u;
constexpr uint32_t kMinusZeroBits = 0x80000000u;
constexpr uint32_t kInv448Bits = 0x3b124925u;  // fl(1/448)
constexpr uint8_t kE4m3Nan = 0x7f;
constexpr uint8_t kUe8m0Nan = 255;
constexpr uint8_t kUe8m0One = 127;

DGMOE_HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

DGMOE_HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

DGMOE_HD float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// ---- bf16 and fp16, carried as their bits ----

DGMOE_HD float bf16_to_float(uint16_t x) { return bits_float(static_cast<uint32_t>(x) << 16); }

// Round to nearest even; every NaN becomes 0x7fc0.
DGMOE_HD uint16_t float_to_bf16(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > kInfBits ? 0x7fc0u : rounded);
}

DGMOE_HD float half_to_float(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t magnitude = x & 0x7fffu;
  // Subnormals are multiples of 2^-24, exact in fp32.
  const uint32_t subnormal = float_bits(static_cast<float>(magnitude) * 5.9604644775390625e-8f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = kInfBits | ((magnitude & 0x3ffu) << 13);
  return bits_float(sign | (magnitude < 0x400u    ? subnormal
                            : magnitude < 0x7c00u ? normal
                                                  : special));
}

// ---- e4m3fn ----

// Round to nearest even, saturating at +-448 (also for infinities); every NaN becomes 0x7f.
DGMOE_HD uint8_t float_to_e4m3(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 24) & 0x80u;
  // Below 2^-6 codes count steps of 2^-9, the unit in the last place of 2^14: adding 2^14 rounds to
  // them.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 16384.0f) - 0x46800000u;
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  uint32_t code = magnitude < (121u << 23) ? subnormal : normal;
  code = magnitude > 0x43e00000u ? 0x7eu : code;
  return static_cast<uint8_t>(magnitude > kInfBits ? kE4m3Nan : (sign | code));
}

// Selects by masks: a conditional would keep compilers from vectorising it, since the conversion to
// float might trap.
DGMOE_HD float e4m3_to_float(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t is_subnormal = 0u - static_cast<uint32_t>(magnitude < 8u);
  const uint32_t is_nan = 0u - static_cast<uint32_t>(magnitude == kE4m3Nan);
  const float steps =
      static_cast<float>(static_cast<int32_t>(magnitude)) * 0.001953125f;  // of 2^-9
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t finite = (float_bits(steps) & is_subnormal) | (normal & ~is_subnormal);
  return bits_float(sign | (finite & ~is_nan) | (kNanBits & is_nan));
}

// ---- UE8M0: byte b is 2^(b-127), 255 is NaN ----

// Rounds the bits of a float up. Finite positive input lands in [1, 254] (+0 too: 1); inf, NaN and
// every other sign bit is NaN.
DGMOE_HD uint8_t bits_to_ue8m0(uint32_t bits) {
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0u ? 1u : 0u);
  const uint32_t clamped = exponent < 1u ? 1u : exponent > 254u ? 254u : exponent;
  return static_cast<uint8_t>(bits >= kInfBits ? kUe8m0Nan : clamped);
}

// The same of any float: a zero of either sign is 1.
DGMOE_HD uint8_t float_to_ue8m0(float x) {
  const uint32_t bits = float_bits(x);
  return bits_to_ue8m0(bits == kMinusZeroBits ? 0u : bits);
}

DGMOE_HD float ue8m0_to_float(uint8_t byte) {
  const uint32_t normal = static_cast<uint32_t>(byte) << 23;
  return bits_float(byte == kUe8m0Nan ? kNanBits : byte == 0 ? 0x00400000u : normal);
}

// The byte of a scale that is a power of two from 2^-127 on; a zero of either sign, which others
// decode byte 0 to, is byte 0. Nothing is rounded: whatever else is NaN.
DGMOE_HD uint8_t exact_ue8m0(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t normal = (bits & 0x807fffffu) == 0u ? bits >> 23 : kUe8m0Nan;
  return static_cast<uint8_t>(bits == 0x00400000u || bits == kMinusZeroBits ? 0u : normal);
}

// ---- e2m1: bit 3 is the sign; codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6 ----

// Round to nearest even, saturating at +-6 (also for infinities); the sign of a zero stays. There is
// no code for NaN, whose group carries it in its scale.
DGMOE_HD uint8_t float_to_e2m1(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // How many midpoints lie below: 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5. Every second one is a tie that
  // rounds up.
  const uint32_t code = static_cast<uint32_t>(magnitude > 0x3e800000u) +
                        static_cast<uint32_t>(magnitude >= 0x3f400000u) +
                        static_cast<uint32_t>(magnitude > 0x3fa00000u) +
                        static_cast<uint32_t>(magnitude >= 0x3fe00000u) +
                        static_cast<uint32_t>(magnitude > 0x40200000u) +
                        static_cast<uint32_t>(magnitude >= 0x40600000u) +
                        static_cast<uint32_t>(magnitude > 0x40a00000u);
  return static_cast<uint8_t>(((bits >> 28) & 8u) | code);
}

DGMOE_HD float e2m1_to_float(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 8u) << 28;
  const uint32_t magnitude = code & 7u;
  const uint32_t normal = (magnitude << 22) + (126u << 23);
  return bits_float(sign | (magnitude > 1u ? normal : magnitude * 0x3f000000u));
}

// The byte of the least power of two by which a group whose largest |x| has the bits `amax_bits` fits
// into +-6. The mantissa of 6 is 1.5: one above it takes the next exponent. In [92, 253], or NaN.
DGMOE_HD uint8_t e2m1_exponent(uint32_t amax_bits) {
  const uint32_t floor_bits = float_bits(kMinAmax);
  const uint32_t bits = amax_bits > floor_bits ? amax_bits : floor_bits;
  const uint32_t exponent = ((bits + 0x3fffffu) >> 23) - 2u;
  return static_cast<uint8_t>(amax_bits >= kInfBits ? kUe8m0Nan : exponent);
}

// ---- group quantisation ----

struct GroupScale {
  float scale;       // what the GEMM multiplies by
  uint8_t exponent;  // the same as a UE8M0 byte; meaningful when rounded to a power of two
  float multiplier;  // what a value is multiplied by before the cast
};

// The scale of a group whose largest |x| has the bits `amax_bits` (compare magnitudes as integers:
// NaN wins). A group that holds an inf or a NaN gets scale NaN and multiplier NaN, so that every
// byte of it is NaN.
DGMOE_HD GroupScale group_scale(uint32_t amax_bits, bool power_of_two) {
  if (amax_bits >= kInfBits) {
    return {bits_float(kNanBits), kUe8m0Nan, bits_float(kNanBits)};
  }
  const float amax = bits_float(amax_bits) > kMinAmax ? bits_float(amax_bits) : kMinAmax;
  const float scale = amax * bits_float(kInv448Bits);
  if (!power_of_two) {
    return {scale, 0, kE4m3Max / amax};
  }
  const uint8_t exponent = bits_to_ue8m0(float_bits(scale));
  // The exact inverse is normal: 1e-10 <= amax <= FLT_MAX keeps the byte in [85, 248].
  return {ue8m0_to_float(exponent), exponent, bits_float((254u - exponent) << 23)};
}

DGMOE_HD uint8_t quantize(float x, float multiplier) { return float_to_e4m3(x * multiplier); }

// ---- functions ----

// e^x, at most 2 ulp off, subnormal results included. x = n ln2 + r with |r| <= ln2 / 2; e^r by a
// polynomial fitted for least relative error; 2^n applied in two halves so that neither overflows.
DGMOE_HD float exp_f32(float x) {
  float clamped = x < -104.0f ? -104.0f : x;
  clamped = clamped > 89.0f ? 89.0f : clamped;
  const float shifted =
      fused_multiply_add(clamped, 0x1.715476p+0f, 12582912.0f);  // 1.5 * 2^23: rounds to integer
  const float n = shifted - 12582912.0f;
  float r = fused_multiply_add(n, -0x1.62e400p-1f, clamped);
  r = fused_multiply_add(n, -0x1.7f7d1cp-20f, r);
  float p = 0x1.6a23ccp-10f;
  p = fused_multiply_add(p, r, 0x1.123a20p-7f);
  p = fused_multiply_add(p, r, 0x1.5558f2p-5f);
  p = fused_multiply_add(p, r, 0x1.555492p-3f);
  p = fused_multiply_add(p, r, 0x1.fffffcp-2f);
  p = fused_multiply_add(p * r, r, r) + 1.0f;
  const int32_t steps = static_cast<int32_t>(float_bits(shifted) - 0x4b400000u);
  const int32_t half = steps >> 1;
  const float scale0 = bits_float(static_cast<uint32_t>(half + 127) << 23);
  const float scale1 = bits_float(static_cast<uint32_t>(steps - half + 127) << 23);
  return p * scale0 * scale1;
}

// tanh, at most 2 ulp off, odd to the bit: an odd polynomial fitted for least relative error where
// 1 - 2 / (e^2x + 1) would cancel.
DGMOE_HD float tanh_f32(float x) {
  const uint32_t sign = float_bits(x) & 0x80000000u;
  const float magnitude = bits_float(float_bits(x) & 0x7fffffffu);
  const float square = magnitude * magnitude;
  float p = -0x1.9b3070p-8f;
  p = fused_multiply_add(p, square, 0x1.593d10p-6f);
  p = fused_multiply_add(p, square, -0x1.b9287cp-5f);
  p = fused_multiply_add(p, square, 0x1.110d26p-3f);
  p = fused_multiply_add(p, square, -0x1.55554ap-2f);
  const float near = fused_multiply_add(p * square, magnitude, magnitude);
  const float far = 1.0f - 2.0f / (exp_f32(magnitude + magnitude) + 1.0f);
  return bits_float(float_bits(magnitude < 0.55f ? near : far) | sign);
}

// x sigmoid(z).
DGMOE_HD float gate(float x, float z) { return x / (1.0f + exp_f32(-z)); }
DGMOE_HD float silu(float x) { return gate(x, x); }

// 1 / (1 + e^-x). Where e^-x overflows, a zero instead of some 1e-39.
DGMOE_HD float sigmoid(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

// log(1 + x) for 0 <= x <= 1, at most 2 ulp off. Above sqrt(2) - 1 it is ln2 + log(1 + r) with
// 1 + r = (1 + x) / 2, so that |r| < 0.42; log(1 + r) by a polynomial fitted for least relative
// error.
DGMOE_HD float log1p_unit(float x) {
  const bool upper = x > 0x1.a8279ap-2f;
  const float r = upper ? fused_multiply_add(0.5f, x, -0.5f) : x;
  float p = -0x1.383994p-4f;
  p = fused_multiply_add(p, r, 0x1.085d90p-3f);
  p = fused_multiply_add(p, r, -0x1.0f407ep-3f);
  p = fused_multiply_add(p, r, 0x1.226e72p-3f);
  p = fused_multiply_add(p, r, -0x1.5425bep-3f);
  p = fused_multiply_add(p, r, 0x1.99a416p-3f);
  p = fused_multiply_add(p, r, -0x1.000432p-2f);
  p = fused_multiply_add(p, r, 0x1.555550p-2f);
  p = fused_multiply_add(p, r, -0x1.fffff8p-2f);
  return fused_multiply_add(r * r, p, r) + (upper ? 0x1.62e430p-1f : 0.0f);
}

DGMOE_HD float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// sqrt(log(1 + e^x)), at most 4 ulp off; the logarithm is max(x, 0) + log(1 + e^-|x|).
DGMOE_HD float sqrt_softplus(float x) {
  const float rest = log1p_unit(exp_f32(x > 0.0f ? -x : x));
  return square_root((x > 0.0f ? x : 0.0f) + rest);
}

}  // namespace dgmoe
