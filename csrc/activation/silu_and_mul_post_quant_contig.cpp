#include "silu_and_mul_post_quant_contig.h"

#include "../common/contract.h"
#include "gated_cpu.h"

namespace dgmoe {
namespace {

std::tuple<Tensor, Tensor> silu_and_mul_post_quant_contig_cpu(
    const Tensor& gate_up, const std::optional<Tensor>& m_indices, int64_t group_size,
    int64_t scale_layout, bool round_scale, bool round_activation, int64_t alignment,
    std::optional<double> swiglu_limit, std::optional<double> gemm1_alpha,
    std::optional<double> gemm1_clamp_limit, int64_t gate_up_interleave,
    const std::optional<Tensor>& bias) {
  const GatedQuantCall call = plan_silu_and_mul_post_quant_contig(
      gate_up, m_indices, group_size, scale_layout, round_scale, round_activation, alignment,
      swiglu_limit, gemm1_alpha, gemm1_clamp_limit, gate_up_interleave, bias);
  gated_quant_cpu("silu_and_mul_post_quant_contig", call.plan);
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kSiluAndMulPostQuantContigSchema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("silu_and_mul_post_quant_contig", DGMOE_BOX(dgmoe::silu_and_mul_post_quant_contig_cpu));
}
DGMOE_CONTRACT(silu_and_mul_post_quant_contig, kSiluAndMulPostQuantContigSchema)
