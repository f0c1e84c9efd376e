#include "quant_mxfp4.h"

#include "../common/contract.h"
#include "mx_cpu.h"

namespace dgmoe {
namespace {

DGMOE_HD float group_error(const float* x, float multiplier, float factor) {
  float sums[kMxOctets];
  for (int64_t i = 0; i < kMxOctets; ++i) sums[i] = e2m1_error(x + i * 8, multiplier, factor);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// `begin` and `end` count rows of all experts.
DGMOE_CPU_CLONES
void quant_rows(const QuantMxfp4Plan& plan, int64_t begin, int64_t end) {
  const WeightRows& weight = plan.weight;
  const int64_t groups = weight.groups();
  float x[kMxGroup];
  uint8_t codes[kMxGroup];
  for (int64_t line = begin; line < end; ++line) {
    const int64_t in = weight.offset(line / weight.n, line % weight.n);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t k0 = group * kMxGroup;
      const int64_t count = weight.k - k0 < kMxGroup ? weight.k - k0 : kMxGroup;
      uint8_t exponent = e2m1_exponent(load_group(weight, in + k0, count, x));
      const bool broken = exponent == kUe8m0Nan;
      if (plan.search && !broken) {
        const float plain = e2m1_multiplier(exponent);
        exponent = best_exponent(exponent, group_error(x, plain, 1.0f), group_error(x, plain, 0.5f),
                                 group_error(x, plain, 2.0f));
      }
      plan.scale[line * groups + group] = exponent;
      const float multiplier = e2m1_multiplier(exponent);
      for (int64_t i = 0; i < kMxGroup; ++i) {
        codes[i] = broken ? 0 : float_to_e2m1(x[i] * multiplier);
      }
      uint8_t* __restrict__ q = plan.q + (line * weight.k + k0) / 2;
      for (int64_t i = 0; i < count / 2; ++i) {
        q[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
      }
    }
  }
}

std::tuple<Tensor, Tensor> quant_mxfp4_cpu(const Tensor& weight, bool search) {
  QuantMxfp4Call call = plan_quant_mxfp4(weight, search);
  const QuantMxfp4Plan& plan = call.plan;
  parallel_items(plan.weight.batches * plan.weight.n, plan.weight.k,
                 [&](int64_t begin, int64_t end) { quant_rows(plan, begin, end); });
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kQuantMxfp4Schema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("quant_mxfp4", DGMOE_BOX(dgmoe::quant_mxfp4_cpu));
}
DGMOE_CONTRACT(quant_mxfp4, kQuantMxfp4Schema)
