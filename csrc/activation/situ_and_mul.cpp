#include "situ_and_mul.h"

#include "../common/contract.h"
#include "gated_cpu.h"

namespace dgmoe {
namespace {

Tensor situ_and_mul_cpu(const Tensor& gate_up, const std::optional<Tensor>& masked_m,
                        const std::optional<Tensor>& m_indices, double beta, double linear_beta,
                        int64_t gate_up_interleave, const std::optional<Tensor>& bias) {
  const GatedBf16Call call =
      plan_situ_and_mul(gate_up, masked_m, m_indices, beta, linear_beta, gate_up_interleave, bias);
  gated_bf16_cpu("situ_and_mul", call.plan);
  return call.out;
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kSituAndMulSchema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("situ_and_mul", DGMOE_BOX(dgmoe::situ_and_mul_cpu));
}
DGMOE_CONTRACT(situ_and_mul, kSituAndMulSchema)
