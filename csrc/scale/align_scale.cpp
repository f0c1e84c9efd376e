#include "align_scale.h"

#include <algorithm>

#include "../common/contract.h"
#include "../common/parallel.h"

namespace dgmoe {
namespace {

constexpr int64_t kBand =
    64;  // rows transposed at a time, so that their lines stay in the first cache

// `begin` and `end` count the bands of all batches.
void align_bands(const AlignScalePlan& plan, int64_t begin, int64_t end) {
  const int64_t bands = ceil_div(plan.padded_rows, kBand);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t batch = i / bands;
    const int64_t first = i % bands * kBand;
    const int64_t last = std::min(first + kBand, plan.padded_rows);
    const int64_t valid = std::min(last, plan.rows);
    for (int64_t group = 0; group < plan.strides.groups; ++group) {
      const float* in = plan.in + batch * plan.in_batch_stride + group * plan.in_group_stride;
      float* out = plan.out + plan.strides.at(batch, 0, group);
      for (int64_t row = first; row < valid; ++row) out[row] = in[row * plan.in_row_stride];
      for (int64_t row = valid; row < last; ++row) out[row] = 1.0f;
    }
  }
}

Tensor align_scale_cpu(const Tensor& scale) {
  AlignScaleCall call = plan_align_scale(scale);
  const AlignScalePlan& plan = call.plan;
  parallel_items(plan.batches * ceil_div(plan.padded_rows, kBand), kBand * plan.strides.groups,
                 [&](int64_t begin, int64_t end) { align_bands(plan, begin, end); });
  return call.out;
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kAlignScaleSchema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("align_scale", DGMOE_BOX(dgmoe::align_scale_cpu));
}
DGMOE_CONTRACT(align_scale, kAlignScaleSchema)
