// pack_ue8m0: scales to packed UE8M0 exponent bytes, as SM100 and SM120 GEMMs read them.
//   scale  [mn, groups] or [batch, mn, groups] float32, or UE8M0 bytes (uint8, float8_e8m0fnu), any
//          strides
//   ->     [.., mn, ceil(groups / 4)] int32, four bytes a word, little end first, strides
//          (1, round_up(mn, 4))
// fp32 rounds up: byte = exponent + (mantissa != 0), in [1, 254], a zero of either sign being 1; inf,
// NaN and negative scales are byte 255 (NaN). Bytes stay as they are, 0 (2^-127) and 255 (NaN) too.
// Missing bytes of a row's last word are 0; the up to three rows of slack hold 1.
#pragma once

#include "../common/allocate.h"

namespace dgmoe {

constexpr char kPackUe8m0Schema[] = "pack_ue8m0(Tensor scale) -> Tensor";

struct PackUe8m0Plan {
  const void* in;
  bool is_float;
  int64_t in_batch_stride, in_row_stride, in_group_stride;
  void* out;
  ScaleStrides strides;
  int64_t batches, rows, padded_rows;

  DGMOE_HD uint8_t exponent(int64_t batch, int64_t row, int64_t group) const {
    const int64_t at = batch * in_batch_stride + row * in_row_stride + group * in_group_stride;
    return is_float ? float_to_ue8m0(static_cast<const float*>(in)[at])
                    : static_cast<const uint8_t*>(in)[at];
  }
};

struct PackUe8m0Call {
  Tensor out;
  PackUe8m0Plan plan;
};

inline PackUe8m0Call plan_pack_ue8m0(const Tensor& scale) {
  const Check check("pack_ue8m0");
  check.dtype("scale", scale, {ScalarType::Float, ScalarType::Byte, ScalarType::Float8_e8m0fnu});
  const bool batched = scale.dim() == 3;
  if (!batched) check.dim("scale", scale, 2, "(mn, groups) or (batch, mn, groups)");
  const int64_t d = batched ? 1 : 0;
  const int64_t rows = scale.size(d);
  ScaleTensor out = empty_scale(check.op(), "packed", batched ? scale.size(0) : -1, rows,
                                scale.size(d + 1), ScaleLayout::kPackedUe8m0, scale);
  PackUe8m0Plan plan{data_of(scale),
                     dtype_of(scale) == ScalarType::Float,
                     batched ? scale.stride(0) : 0,
                     scale.stride(d),
                     scale.stride(d + 1),
                     mutable_data_of(out.tensor),
                     out.strides,
                     batched ? scale.size(0) : 1,
                     rows,
                     tma_aligned(rows)};
  return {out.tensor, plan};
}

}  // namespace dgmoe
