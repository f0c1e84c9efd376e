#include "gemm_nt_f8f8bf16.h"

#include "deep_gemm/deep_gemm.cuh"

namespace dgmoe {
namespace {

Tensor run(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
           const GivenGranularity& recipe_a, const GivenGranularity& recipe_b,
           const std::optional<Tensor>& out) {
  const CudaScope scope(a);
  GroupedGemmCall call = plan_gemm_nt_f8f8bf16(a, a_scale, b, b_scale, recipe_a, recipe_b, out);
  const GroupedGemmPlan& p = call.plan;
  deep_gemm(scope, {DeepGemmOp::kF8, "gemm_nt_f8f8bf16", passed_on(p, recipe_a.has_value()), &a,
                    &a_scale, &b, &b_scale, nullptr, &call.d});
  return call.d;
}

Tensor gemm_nt_f8f8bf16_cuda(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                             const Tensor& b_scale, const GivenGranularity& recipe_a,
                             const GivenGranularity& recipe_b) {
  return run(a, a_scale, b, b_scale, recipe_a, recipe_b, std::nullopt);
}

void gemm_nt_f8f8bf16_out_cuda(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                               const Tensor& b_scale, const GivenGranularity& recipe_a,
                               const GivenGranularity& recipe_b, Tensor& out) {
  run(a, a_scale, b, b_scale, recipe_a, recipe_b, out);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("gemm_nt_f8f8bf16", DGMOE_BOX(dgmoe::gemm_nt_f8f8bf16_cuda));
  m.impl("gemm_nt_f8f8bf16.out", DGMOE_BOX(dgmoe::gemm_nt_f8f8bf16_out_cuda));
}
