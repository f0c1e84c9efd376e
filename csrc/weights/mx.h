// What the MX ops of this room share: rows of weights in groups of 32 columns, each with a UE8M0
// scale.
#pragma once

#include "../common/allocate.h"

namespace dgmoe {

constexpr int64_t kMxGroup = 32;
constexpr int64_t kMxOctets = kMxGroup / 8;  // sums run over eight columns, then over octets

// (batches, n, k) weights, bf16 or fp32, rows dense.
struct WeightRows {
  const void* data;
  bool is_bf16;
  int64_t batches, n, k;
  int64_t batch_stride, row_stride;  // in elements

  DGMOE_HD int64_t groups() const { return ceil_div(k, kMxGroup); }
  DGMOE_HD int64_t offset(int64_t batch, int64_t row) const {
    return batch * batch_stride + row * row_stride;
  }
};

// UE8M0 scales as a checkpoint has them: bytes, or fp32 powers of two.
struct ExponentMatrix {
  const void* data;
  bool is_float;
  int64_t batch_stride, row_stride, column_stride;  // in elements

  DGMOE_HD uint8_t operator()(int64_t batch, int64_t row, int64_t column) const {
    const int64_t at = batch * batch_stride + row * row_stride + column * column_stride;
    return is_float ? exact_ue8m0(static_cast<const float*>(data)[at])
                    : static_cast<const uint8_t*>(data)[at];
  }
};

inline void check_weight_dims(const Check& check, const Tensor& weight) {
  if (weight.dim() != 3) check.dim("weight", weight, 2, "(n, k) or (experts, n, k)");
}

// `in` is `weight` with aligned rows; the caller keeps it alive.
inline WeightRows weight_rows(const Tensor& in) {
  const bool batched = in.dim() == 3;
  const int64_t d = batched ? 1 : 0;
  return {data_of(in),
          dtype_of(in) == ScalarType::BFloat16,
          batched ? in.size(0) : 1,
          in.size(d),
          in.size(d + 1),
          batched ? in.stride(0) : 0,
          in.stride(d)};
}

// Scales of a weight, (rows, columns) for each expert.
inline ExponentMatrix exponent_matrix(const Check& check, const Tensor& scale, const Tensor& weight,
                                      int64_t rows, int64_t columns) {
  check.dtype("scale", scale, {ScalarType::Byte, ScalarType::Float8_e8m0fnu, ScalarType::Float});
  const int64_t dim = weight.dim();
  const bool batched = dim == 3;
  const bool fits = scale.dim() == dim && (!batched || scale.size(0) == weight.size(0)) &&
                    scale.size(dim - 2) == rows && scale.size(dim - 1) == columns;
  if (!fits) {
    std::ostringstream must;
    must << "have shape (";
    if (batched) must << weight.size(0) << ", ";
    must << rows << ", " << columns << ") for weight " << shape_text(weight);
    check.that(false, "scale", must.str(), shape_text(scale));
  }
  check.same_device("scale", scale, "weight", weight);
  return {data_of(scale), dtype_of(scale) == ScalarType::Float, batched ? scale.stride(0) : 0,
          scale.stride(dim - 2), scale.stride(dim - 1)};
}

// The shape of `weight` with its last two dimensions replaced.
inline Sizes with_matrix(const Tensor& weight, int64_t rows, int64_t columns) {
  Sizes sizes(weight.sizes().begin(), weight.sizes().end());
  sizes[sizes.size() - 2] = rows;
  sizes[sizes.size() - 1] = columns;
  return sizes;
}

}  // namespace dgmoe
