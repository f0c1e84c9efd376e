#include "silu_and_mul.h"

#include "../common/contract.h"
#include "gated_cpu.h"

namespace dgmoe {
namespace {

Tensor silu_and_mul_cpu(const Tensor& gate_up, const std::optional<Tensor>& masked_m,
                        const std::optional<Tensor>& m_indices, std::optional<double> swiglu_limit,
                        std::optional<double> gemm1_alpha, std::optional<double> gemm1_clamp_limit,
                        int64_t gate_up_interleave, const std::optional<Tensor>& bias) {
  const GatedBf16Call call =
      plan_silu_and_mul(gate_up, masked_m, m_indices, swiglu_limit, gemm1_alpha, gemm1_clamp_limit,
                        gate_up_interleave, bias);
  gated_bf16_cpu("silu_and_mul", call.plan);
  return call.out;
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kSiluAndMulSchema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("silu_and_mul", DGMOE_BOX(dgmoe::silu_and_mul_cpu));
}
DGMOE_CONTRACT(silu_and_mul, kSiluAndMulSchema)
