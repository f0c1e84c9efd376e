#include "pack_ue8m0.h"

#include "../common/contract.h"
#include "../common/parallel.h"

namespace dgmoe {
namespace {

DGMOE_CPU_CLONES
void pack_rows(const PackUe8m0Plan& plan, int64_t batch, int64_t begin, int64_t end) {
  const ScaleStrides& strides = plan.strides;
  for (int64_t column = 0; column < strides.columns(); ++column) {
    for (int64_t row = begin; row < end; ++row) {
      if (row >= plan.rows) {
        store_unit_scale(plan.out, strides, batch, row, column);
        continue;
      }
      uint32_t word = 0;
      for (int64_t byte = 0; byte < kGroupsPerWord; ++byte) {
        const int64_t group = column * kGroupsPerWord + byte;
        if (group >= strides.groups) break;
        word |= static_cast<uint32_t>(plan.exponent(batch, row, group)) << (8 * byte);
      }
      static_cast<uint32_t*>(plan.out)[strides.at(batch, row, column)] = word;
    }
  }
}

Tensor pack_ue8m0_cpu(const Tensor& scale) {
  PackUe8m0Call call = plan_pack_ue8m0(scale);
  const PackUe8m0Plan& plan = call.plan;
  for (int64_t batch = 0; batch < plan.batches; ++batch) {
    parallel_items(plan.padded_rows, plan.strides.groups,
                   [&](int64_t begin, int64_t end) { pack_rows(plan, batch, begin, end); });
  }
  return call.out;
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kPackUe8m0Schema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) { m.impl("pack_ue8m0", DGMOE_BOX(dgmoe::pack_ue8m0_cpu)); }
DGMOE_CONTRACT(pack_ue8m0, kPackUe8m0Schema)
