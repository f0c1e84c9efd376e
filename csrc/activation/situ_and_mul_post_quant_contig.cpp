#include "situ_and_mul_post_quant_contig.h"

#include "../common/contract.h"
#include "gated_cpu.h"

namespace dgmoe {
namespace {

std::tuple<Tensor, Tensor> situ_and_mul_post_quant_contig_cpu(
    const Tensor& gate_up, const std::optional<Tensor>& m_indices, double beta, double linear_beta,
    int64_t group_size, int64_t scale_layout, bool round_scale, bool round_activation,
    int64_t alignment, int64_t gate_up_interleave, const std::optional<Tensor>& bias) {
  const GatedQuantCall call = plan_situ_and_mul_post_quant_contig(
      gate_up, m_indices, beta, linear_beta, group_size, scale_layout, round_scale,
      round_activation, alignment, gate_up_interleave, bias);
  gated_quant_cpu("situ_and_mul_post_quant_contig", call.plan);
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kSituAndMulPostQuantContigSchema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("situ_and_mul_post_quant_contig", DGMOE_BOX(dgmoe::situ_and_mul_post_quant_contig_cpu));
}
DGMOE_CONTRACT(situ_and_mul_post_quant_contig, kSituAndMulPostQuantContigSchema)
