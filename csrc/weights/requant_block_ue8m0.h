// requant_block_ue8m0: block FP8 weights with any scales to block FP8 with power-of-two scales.
//   weight  [n, k] or [experts, n, k] float8_e4m3fn, any strides
//   scale   [.., ceil(n / 128), ceil(k / 128)] float32, uint8 or float8_e8m0fnu exponent bytes, any
//           strides
//   ->      q same shape float8_e4m3fn, scale [.., ceil(n / 128), ceil(k / 128)] uint8 exponent
//           bytes, both contiguous
// A block whose scale is a power of two from 2^-127 on keeps scale and bytes. Others are widened to
// fp32 and quantised as in quant_block_fp8 with rounded scales; a scale or value of NaN or inf makes
// its block NaN, scale byte 255.
#pragma once

#include "mx.h"

namespace dgmoe {

constexpr char kRequantBlockUe8m0Schema[] =
    "requant_block_ue8m0(Tensor weight, Tensor scale) -> (Tensor, Tensor)";

struct RequantBlockUe8m0Plan {
  const uint8_t* weight;
  int64_t batch_stride, row_stride;  // of weight, in bytes
  bool vectors;                      // every eighth column of a row starts on eight bytes
  ExponentMatrix scale;
  uint8_t* q;
  uint8_t* exponent;
  int64_t batches, n, k;

  DGMOE_HD int64_t block_rows() const { return ceil_div(n, kWeightBlock); }
  DGMOE_HD int64_t block_columns() const { return ceil_div(k, kWeightBlock); }
};

struct RequantBlockUe8m0Call {
  Tensor weight;
  Tensor q, scale;
  RequantBlockUe8m0Plan plan;
};

inline RequantBlockUe8m0Call plan_requant_block_ue8m0(const Tensor& weight, const Tensor& scale) {
  const Check check("requant_block_ue8m0");
  check.dtype("weight", weight, {ScalarType::Float8_e4m3fn});
  check_weight_dims(check, weight);
  const bool batched = weight.dim() == 3;
  const int64_t d = batched ? 1 : 0;
  const int64_t n = weight.size(d);
  const int64_t k = weight.size(d + 1);
  const int64_t rows = ceil_div(n, kWeightBlock);
  const int64_t columns = ceil_div(k, kWeightBlock);
  const ExponentMatrix scales = exponent_matrix(check, scale, weight, rows, columns);
  Tensor in = with_aligned_rows(check.op(), "weight", weight);
  Tensor q = empty(check.op(), "q", with_matrix(weight, n, k), ScalarType::Float8_e4m3fn, weight);
  Tensor exponent =
      empty(check.op(), "scale", with_matrix(weight, rows, columns), ScalarType::Byte, weight);
  const int64_t batch_stride = batched ? in.stride(0) : 0;
  RequantBlockUe8m0Plan plan{static_cast<const uint8_t*>(data_of(in)),
                             batch_stride,
                             in.stride(d),
                             k % 8 == 0 && batch_stride % 8 == 0 && in.stride(d) % 8 == 0,
                             scales,
                             static_cast<uint8_t*>(mutable_data_of(q)),
                             static_cast<uint8_t*>(mutable_data_of(exponent)),
                             batched ? weight.size(0) : 1,
                             n,
                             k};
  return {in, q, exponent, plan};
}

// The scale of a block, and whether the block stays as it is.
struct BlockSource {
  float scale;
  uint8_t exponent;
  bool keep;
};

DGMOE_HD BlockSource block_source(const ExponentMatrix& scales, int64_t batch, int64_t row,
                                  int64_t column) {
  const uint8_t exponent = scales(batch, row, column);
  if (!scales.is_float) return {0.0f, exponent, true};
  const float scale =
      static_cast<const float*>(scales.data)[batch * scales.batch_stride + row * scales.row_stride +
                                             column * scales.column_stride];
  // A scale of zero has no UE8M0 code: byte 0 would be 2^-127, so the block is quantised anew.
  return {scale, exponent, exponent != kUe8m0Nan && scale != 0.0f};
}

}  // namespace dgmoe
