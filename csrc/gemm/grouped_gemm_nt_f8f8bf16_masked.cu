#include "grouped_gemm_nt_f8f8bf16_masked.h"

#include "deep_gemm/deep_gemm.cuh"
#include "sm90/mx_grouped_gemm.cuh"

namespace dgmoe {
namespace {

Tensor run(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
           const Tensor& masked_m, int64_t expected_m, const GivenGranularity& recipe_a,
           const GivenGranularity& recipe_b, const std::optional<Tensor>& out,
           const std::optional<Tensor>& workspace) {
  const CudaScope scope(a);
  GroupedGemmCall call = plan_grouped_gemm_nt_f8f8bf16_masked(
      a, a_scale, b, b_scale, masked_m, expected_m, recipe_a, recipe_b, out, workspace);
  const GroupedGemmPlan& p = call.plan;
  if (run_mx_grouped_gemm(scope, "grouped_gemm_nt_f8f8bf16_masked", call)) return call.d;
  // The library's own default is not that of FP4.
  const bool named = recipe_a.has_value() || p.b_fp4;
  deep_gemm(scope, {DeepGemmOp::kGroupedF8Masked, "grouped_gemm_nt_f8f8bf16_masked",
                    passed_on(p, named), &a, &a_scale, &b, &b_scale, &masked_m, &call.d});
  return call.d;
}

Tensor grouped_gemm_nt_f8f8bf16_masked_cuda(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                                            const Tensor& b_scale, const Tensor& masked_m,
                                            int64_t expected_m, const GivenGranularity& recipe_a,
                                            const GivenGranularity& recipe_b) {
  return run(a, a_scale, b, b_scale, masked_m, expected_m, recipe_a, recipe_b, std::nullopt,
             std::nullopt);
}

void grouped_gemm_nt_f8f8bf16_masked_out_cuda(const Tensor& a, const Tensor& a_scale,
                                              const Tensor& b, const Tensor& b_scale,
                                              const Tensor& masked_m, int64_t expected_m,
                                              const GivenGranularity& recipe_a,
                                              const GivenGranularity& recipe_b, Tensor& out,
                                              const std::optional<Tensor>& workspace) {
  run(a, a_scale, b, b_scale, masked_m, expected_m, recipe_a, recipe_b, out, workspace);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("grouped_gemm_nt_f8f8bf16_masked", DGMOE_BOX(dgmoe::grouped_gemm_nt_f8f8bf16_masked_cuda));
  m.impl("grouped_gemm_nt_f8f8bf16_masked.out",
         DGMOE_BOX(dgmoe::grouped_gemm_nt_f8f8bf16_masked_out_cuda));
}
