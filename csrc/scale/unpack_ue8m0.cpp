#include "unpack_ue8m0.h"

#include "../common/contract.h"
#include "../common/parallel.h"

namespace dgmoe {
namespace {

// `begin` and `end` count rows of all batches.
void unpack_rows(const UnpackUe8m0Plan& plan, int64_t begin, int64_t end) {
  const ScaleStrides& strides = plan.strides;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t batch = i / plan.rows;
    const int64_t row = i % plan.rows;
    float* out = plan.out + i * strides.groups;
    for (int64_t group = 0; group < strides.groups; ++group) {
      out[group] = load_scale(plan.in, strides, batch, row, group);
    }
  }
}

Tensor unpack_ue8m0_cpu(const Tensor& packed, int64_t groups) {
  UnpackUe8m0Call call = plan_unpack_ue8m0(packed, groups);
  const UnpackUe8m0Plan& plan = call.plan;
  parallel_items(plan.batches * plan.rows, groups,
                 [&](int64_t begin, int64_t end) { unpack_rows(plan, begin, end); });
  return call.out;
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kUnpackUe8m0Schema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("unpack_ue8m0", DGMOE_BOX(dgmoe::unpack_ue8m0_cpu));
}
DGMOE_CONTRACT(unpack_ue8m0, kUnpackUe8m0Schema)
