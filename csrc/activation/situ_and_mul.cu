#include "situ_and_mul.h"

#include "gated.cuh"

namespace dgmoe {
namespace {

Tensor situ_and_mul_cuda(const Tensor& gate_up, const std::optional<Tensor>& masked_m,
                         const std::optional<Tensor>& m_indices, double beta, double linear_beta,
                         int64_t gate_up_interleave, const std::optional<Tensor>& bias) {
  const CudaScope scope(gate_up);
  const GatedBf16Call call =
      plan_situ_and_mul(gate_up, masked_m, m_indices, beta, linear_beta, gate_up_interleave, bias);
  gated_bf16_cuda(call.plan, scope);
  return call.out;
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("situ_and_mul", DGMOE_BOX(dgmoe::situ_and_mul_cuda));
}
