// quant_mxfp8: weights to MXFP8, e4m3 with a UE8M0 scale a row and 32 columns.
//   weight  [n, k] or [experts, n, k] bfloat16 or float32, any strides
//   ->      q same shape float8_e4m3fn, scale [.., n, ceil(k / 32)] uint8 exponent bytes, both
//           contiguous: the form of a checkpoint
// Numerics as in quant_group_fp8 with groups of 32 and UE8M0 scales, which round up; a group that
// holds an inf or a NaN is NaN throughout, its scale byte 255.
#pragma once

#include "mx.h"

namespace dgmoe {

constexpr char kQuantMxfp8Schema[] = "quant_mxfp8(Tensor weight) -> (Tensor, Tensor)";

struct QuantMxfp8Plan {
  WeightRows weight;
  uint8_t* q;
  uint8_t* scale;
};

struct QuantMxfp8Call {
  Tensor weight;
  Tensor q, scale;
  QuantMxfp8Plan plan;
};

inline QuantMxfp8Call plan_quant_mxfp8(const Tensor& weight) {
  const Check check("quant_mxfp8");
  check.dtype("weight", weight, {ScalarType::BFloat16, ScalarType::Float});
  check_weight_dims(check, weight);
  Tensor in = with_aligned_rows(check.op(), "weight", weight);
  const WeightRows rows = weight_rows(in);
  Tensor q = empty(check.op(), "q", with_matrix(weight, rows.n, rows.k), ScalarType::Float8_e4m3fn,
                   weight);
  Tensor scale = empty(check.op(), "scale", with_matrix(weight, rows.n, rows.groups()),
                       ScalarType::Byte, weight);
  QuantMxfp8Plan plan{rows, static_cast<uint8_t*>(mutable_data_of(q)),
                      static_cast<uint8_t*>(mutable_data_of(scale))};
  return {in, q, scale, plan};
}

}  // namespace dgmoe
