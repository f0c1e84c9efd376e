// align_scale: fp32 scales to the MN-major, TMA-aligned layout of SM90 GEMMs. Always a copy.
//   scale  [mn, groups] or [batch, mn, groups] float32, any strides
//   ->     same shape float32, strides (.., 1, round_up(mn, 4))
// Values are unchanged; the up to three rows of alignment slack hold 1.
#pragma once

#include "../common/allocate.h"

namespace dgmoe {

constexpr char kAlignScaleSchema[] = "align_scale(Tensor scale) -> Tensor";

struct AlignScalePlan {
  const float* in;
  int64_t in_batch_stride, in_row_stride, in_group_stride;
  float* out;
  ScaleStrides strides;
  int64_t batches, rows, padded_rows;
};

struct AlignScaleCall {
  Tensor out;
  AlignScalePlan plan;
};

inline AlignScaleCall plan_align_scale(const Tensor& scale) {
  const Check check("align_scale");
  check.dtype("scale", scale, {ScalarType::Float});
  const bool batched = scale.dim() == 3;
  if (!batched) check.dim("scale", scale, 2, "(mn, groups) or (batch, mn, groups)");
  const int64_t d = batched ? 1 : 0;
  const int64_t rows = scale.size(d);
  ScaleTensor out = empty_scale(check.op(), "scale", batched ? scale.size(0) : -1, rows,
                                scale.size(d + 1), ScaleLayout::kMnMajor, scale);
  AlignScalePlan plan{static_cast<const float*>(data_of(scale)),
                      batched ? scale.stride(0) : 0,
                      scale.stride(d),
                      scale.stride(d + 1),
                      static_cast<float*>(mutable_data_of(out.tensor)),
                      out.strides,
                      batched ? scale.size(0) : 1,
                      rows,
                      tma_aligned(rows)};
  return {out.tensor, plan};
}

}  // namespace dgmoe
