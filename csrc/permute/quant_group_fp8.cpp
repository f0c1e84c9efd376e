#include "quant_group_fp8.h"

#include "../common/contract.h"
#include "group_quant.h"

namespace dgmoe {
namespace {

std::tuple<Tensor, Tensor> quant_group_fp8_cpu(const Tensor& x, int64_t group_size,
                                               int64_t scale_layout, bool round_scale,
                                               std::optional<int64_t> padded_k) {
  QuantGroupFp8Call call = plan_quant_group_fp8(x, group_size, scale_layout, round_scale, padded_k);
  const QuantGroupFp8Plan& plan = call.plan;
  const int64_t row_bytes = plan.row_stride * (plan.is_bf16 ? 2 : 4);
  parallel_items(plan.rows, plan.padded_k, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const QuantRow in{static_cast<const char*>(plan.x) + row * row_bytes,
                        plan.is_bf16,
                        plan.k,
                        plan.padded_k,
                        plan.group_size,
                        plan.power_of_two};
      quantize_row(in, plan.q + row * plan.padded_k, plan.scale, plan.strides, 0, row);
    }
  });
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kQuantGroupFp8Schema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("quant_group_fp8", DGMOE_BOX(dgmoe::quant_group_fp8_cpu));
}
DGMOE_CONTRACT(quant_group_fp8, kQuantGroupFp8Schema)
