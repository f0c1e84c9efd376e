#include "situ_and_mul_post_quant_masked.h"

#include "gated.cuh"

namespace dgmoe {
namespace {

std::tuple<Tensor, Tensor> situ_and_mul_post_quant_masked_cuda(
    const Tensor& gate_up, const Tensor& masked_m, double beta, double linear_beta,
    int64_t group_size, int64_t scale_layout, bool round_scale, bool round_activation,
    int64_t gate_up_interleave, const std::optional<Tensor>& bias) {
  const CudaScope scope(gate_up);
  const GatedQuantCall call = plan_situ_and_mul_post_quant_masked(
      gate_up, masked_m, beta, linear_beta, group_size, scale_layout, round_scale, round_activation,
      gate_up_interleave, bias);
  gated_quant_cuda(call.plan, scope);
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("situ_and_mul_post_quant_masked", DGMOE_BOX(dgmoe::situ_and_mul_post_quant_masked_cuda));
}
