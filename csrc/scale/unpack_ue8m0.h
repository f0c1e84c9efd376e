// unpack_ue8m0: packed UE8M0 exponent bytes back to fp32 scales.
//   packed  [mn, ceil(groups / 4)] or [batch, mn, ceil(groups / 4)] int32, any strides
//   groups  scales a row; the last word may hold fewer than four
//   ->      [.., mn, groups] float32, contiguous
// Byte b is 2^(b-127); byte 0 is 2^-127 and byte 255 is NaN, as the hardware reads them.
#pragma once

#include "../common/allocate.h"

namespace dgmoe {

constexpr char kUnpackUe8m0Schema[] = "unpack_ue8m0(Tensor packed, SymInt groups) -> Tensor";

struct UnpackUe8m0Plan {
  const void* in;
  ScaleStrides strides;
  float* out;
  int64_t batches, rows;
};

struct UnpackUe8m0Call {
  Tensor out;
  UnpackUe8m0Plan plan;
};

inline UnpackUe8m0Call plan_unpack_ue8m0(const Tensor& packed, int64_t groups) {
  const Check check("unpack_ue8m0");
  check.dtype("packed", packed, {ScalarType::Int});
  const int64_t dim = packed.dim();
  if (dim != 3) check.dim("packed", packed, 2, "(mn, words) or (batch, mn, words)");
  check.count("groups", groups);
  check.size("packed", packed, dim - 1, ceil_div(groups, kGroupsPerWord), "four groups a word");
  Sizes sizes(packed.sizes().begin(), packed.sizes().end());
  sizes[dim - 1] = groups;
  Tensor out = empty(check.op(), "scale", sizes, ScalarType::Float, packed);
  UnpackUe8m0Plan plan{data_of(packed), scale_strides_of(packed, groups),
                       static_cast<float*>(mutable_data_of(out)), dim == 3 ? packed.size(0) : 1,
                       packed.size(dim - 2)};
  return {out, plan};
}

}  // namespace dgmoe
