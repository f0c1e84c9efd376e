// dequant_mxfp4_to_fp8: MXFP4 weights to block FP8, e4m3 with a UE8M0 scale a 128x128 block.
//   weight  [n, k / 2] or [experts, n, k / 2] int8 or uint8, two e2m1 codes a byte, the low nibble
//           being the even column; any strides
//   scale   [.., n, ceil(k / 32)] uint8 or float8_e8m0fnu exponent bytes, or float32 powers of two,
//           any strides
//   ->      q [.., n, k] float8_e4m3fn, scale [.., ceil(n / 128), ceil(k / 128)] uint8 exponent
//           bytes, both contiguous
// A block's scale is its largest group scale / 64 (at least 2^-127), so that 6 becomes 384. Exact where
// the group scales of a block spread by at most 2^14; what lies lower rounds to nearest. A group whose
// scale is NaN (byte 255, or a float32 that is no power of two) is NaN, and only that one. float32 zero
// reads as byte 0, 2^-127.
#pragma once

#include "mx.h"

namespace dgmoe {

constexpr char kDequantMxfp4ToFp8Schema[] =
    "dequant_mxfp4_to_fp8(Tensor weight, Tensor scale) -> (Tensor, Tensor)";

// Powers of two between a block's scale and its largest group scale: 6 * 2^6 is the largest multiple
// of 6 below 448.
constexpr int kMxfp4Offset = 6;

struct DequantMxfp4ToFp8Plan {
  const uint8_t* weight;
  int64_t batch_stride, row_stride;  // of weight, in bytes
  bool vectors;                      // every fourth byte of a row starts on four bytes
  ExponentMatrix scale;
  uint8_t* q;
  uint8_t* block_scale;
  int64_t batches, n, k;

  DGMOE_HD int64_t groups() const { return ceil_div(k, kMxGroup); }
  DGMOE_HD int64_t block_rows() const { return ceil_div(n, kWeightBlock); }
  DGMOE_HD int64_t block_columns() const { return ceil_div(k, kWeightBlock); }
};

struct DequantMxfp4ToFp8Call {
  Tensor weight;
  Tensor q, scale;
  DequantMxfp4ToFp8Plan plan;
};

inline DequantMxfp4ToFp8Call plan_dequant_mxfp4_to_fp8(const Tensor& weight, const Tensor& scale) {
  const Check check("dequant_mxfp4_to_fp8");
  check.dtype("weight", weight, {ScalarType::Char, ScalarType::Byte});
  if (weight.dim() != 3) check.dim("weight", weight, 2, "(n, k / 2) or (experts, n, k / 2)");
  const bool batched = weight.dim() == 3;
  const int64_t d = batched ? 1 : 0;
  const int64_t n = weight.size(d);
  const int64_t k = weight.size(d + 1) * 2;
  const ExponentMatrix exponents = exponent_matrix(check, scale, weight, n, ceil_div(k, kMxGroup));
  Tensor in = with_aligned_rows(check.op(), "weight", weight);
  Tensor q = empty(check.op(), "q", with_matrix(weight, n, k), ScalarType::Float8_e4m3fn, weight);
  Tensor blocks = empty(check.op(), "scale",
                        with_matrix(weight, ceil_div(n, kWeightBlock), ceil_div(k, kWeightBlock)),
                        ScalarType::Byte, weight);
  const int64_t batch_stride = batched ? in.stride(0) : 0;
  DequantMxfp4ToFp8Plan plan{static_cast<const uint8_t*>(data_of(in)),
                             batch_stride,
                             in.stride(d),
                             k % 8 == 0 && batch_stride % 4 == 0 && in.stride(d) % 4 == 0,
                             exponents,
                             static_cast<uint8_t*>(mutable_data_of(q)),
                             static_cast<uint8_t*>(mutable_data_of(blocks)),
                             batched ? weight.size(0) : 1,
                             n,
                             k};
  return {in, q, blocks, plan};
}

// The exponent of a block from its largest group exponent, NaN left out.
DGMOE_HD uint8_t block_exponent(uint32_t largest) {
  return static_cast<uint8_t>(largest > kMxfp4Offset ? largest - kMxfp4Offset : 0u);
}

// What a code's value is multiplied by. Below 2^-126 everything rounds to zero anyway.
DGMOE_HD float group_multiplier(uint8_t group, uint8_t block) {
  const int32_t exponent = static_cast<int32_t>(group) - block + 127;
  const uint32_t bits = static_cast<uint32_t>(exponent < 1 ? 1 : exponent) << 23;
  return bits_float(group == kUe8m0Nan ? kNanBits : bits);
}

}  // namespace dgmoe
