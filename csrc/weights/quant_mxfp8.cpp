#include "quant_mxfp8.h"

#include "../common/contract.h"
#include "mx_cpu.h"

namespace dgmoe {
namespace {

// `begin` and `end` count rows of all experts.
DGMOE_CPU_CLONES
void quant_rows(const QuantMxfp8Plan& plan, int64_t begin, int64_t end) {
  const WeightRows& weight = plan.weight;
  const int64_t groups = weight.groups();
  float x[kMxGroup];
  for (int64_t line = begin; line < end; ++line) {
    const int64_t in = weight.offset(line / weight.n, line % weight.n);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t k0 = group * kMxGroup;
      const int64_t count = weight.k - k0 < kMxGroup ? weight.k - k0 : kMxGroup;
      const GroupScale scale = group_scale(load_group(weight, in + k0, count, x), true);
      plan.scale[line * groups + group] = scale.exponent;
      uint8_t* __restrict__ q = plan.q + line * weight.k + k0;
      for (int64_t i = 0; i < count; ++i) q[i] = quantize(x[i], scale.multiplier);
    }
  }
}

std::tuple<Tensor, Tensor> quant_mxfp8_cpu(const Tensor& weight) {
  QuantMxfp8Call call = plan_quant_mxfp8(weight);
  const QuantMxfp8Plan& plan = call.plan;
  parallel_items(plan.weight.batches * plan.weight.n, plan.weight.k,
                 [&](int64_t begin, int64_t end) { quant_rows(plan, begin, end); });
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kQuantMxfp8Schema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("quant_mxfp8", DGMOE_BOX(dgmoe::quant_mxfp8_cpu));
}
DGMOE_CONTRACT(quant_mxfp8, kQuantMxfp8Schema)
