// quant_mxfp4: weights to MXFP4, two e2m1 codes a byte with a UE8M0 scale a row and 32 columns.
//   weight  [n, k] or [experts, n, k] bfloat16 or float32, any strides; k even
//   search  choose each group's exponent by least squared error, see below
//   ->      q [.., n, k / 2] int8, the low nibble being the even column; scale
//           [.., n, ceil(k / 32)] uint8 exponent bytes; both contiguous: the form of a checkpoint
// The scale is the least power of two by which the group fits into +-6, amax floored at 1e-10; values
// round to nearest even and keep the sign of a zero. `search` also tries one exponent less (the
// largest values saturate) and one more, and takes the least squared error, the plain one of equals
// first, then the smaller; errors are fp32 sums over eight columns each, added in pairs. A group that
// holds an inf or a NaN has scale byte 255 and codes 0.
#pragma once

#include "mx.h"

namespace dgmoe {

constexpr char kQuantMxfp4Schema[] =
    "quant_mxfp4(Tensor weight, bool search=False) -> (Tensor, Tensor)";

struct QuantMxfp4Plan {
  WeightRows weight;
  uint8_t* q;
  uint8_t* scale;
  bool search;
};

struct QuantMxfp4Call {
  Tensor weight;
  Tensor q, scale;
  QuantMxfp4Plan plan;
};

inline QuantMxfp4Call plan_quant_mxfp4(const Tensor& weight, bool search) {
  const Check check("quant_mxfp4");
  check.dtype("weight", weight, {ScalarType::BFloat16, ScalarType::Float});
  check_weight_dims(check, weight);
  check.that(weight.size(weight.dim() - 1) % 2 == 0, "weight",
             "have an even number of columns, two codes a byte", shape_text(weight));
  Tensor in = with_aligned_rows(check.op(), "weight", weight);
  const WeightRows rows = weight_rows(in);
  Tensor q =
      empty(check.op(), "q", with_matrix(weight, rows.n, rows.k / 2), ScalarType::Char, weight);
  Tensor scale = empty(check.op(), "scale", with_matrix(weight, rows.n, rows.groups()),
                       ScalarType::Byte, weight);
  QuantMxfp4Plan plan{rows, static_cast<uint8_t*>(mutable_data_of(q)),
                      static_cast<uint8_t*>(mutable_data_of(scale)), search};
  return {in, q, scale, plan};
}

// What a value is multiplied by for the exponent byte of a group; in reach of fp32 for all that
// e2m1_exponent gives and its neighbours.
DGMOE_HD float e2m1_multiplier(uint8_t exponent) {
  return bits_float(exponent == kUe8m0Nan ? kNanBits : (254u - exponent) << 23);
}

// The squared error of eight values `x`, in units of the plain scale, under a scale `factor` (0.5, 1
// or 2) times that.
DGMOE_HD float e2m1_error(const float* x, float multiplier, float factor) {
  const float inverse = 1.0f / factor;
  float sum = 0.0f;
  for (int i = 0; i < 8; ++i) {
    const float unit = x[i] * multiplier;
    const float error = unit - e2m1_to_float(float_to_e2m1(unit * inverse)) * factor;
    sum += error * error;
  }
  return sum;
}

// The exponent of least error.
DGMOE_HD uint8_t best_exponent(uint8_t exponent, float plain, float less, float more) {
  const float least = less < plain ? less : plain;
  if (more < least) return exponent + 1;
  return less < plain ? exponent - 1 : exponent;
}

}  // namespace dgmoe
