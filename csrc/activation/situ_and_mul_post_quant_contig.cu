#include "situ_and_mul_post_quant_contig.h"

#include "gated.cuh"

namespace dgmoe {
namespace {

std::tuple<Tensor, Tensor> situ_and_mul_post_quant_contig_cuda(
    const Tensor& gate_up, const std::optional<Tensor>& m_indices, double beta, double linear_beta,
    int64_t group_size, int64_t scale_layout, bool round_scale, bool round_activation,
    int64_t alignment, int64_t gate_up_interleave, const std::optional<Tensor>& bias) {
  const CudaScope scope(gate_up);
  const GatedQuantCall call = plan_situ_and_mul_post_quant_contig(
      gate_up, m_indices, beta, linear_beta, group_size, scale_layout, round_scale,
      round_activation, alignment, gate_up_interleave, bias);
  gated_quant_cuda(call.plan, scope);
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("situ_and_mul_post_quant_contig", DGMOE_BOX(dgmoe::situ_and_mul_post_quant_contig_cuda));
}
