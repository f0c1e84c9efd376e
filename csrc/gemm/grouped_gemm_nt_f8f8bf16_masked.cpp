#include "grouped_gemm_nt_f8f8bf16_masked.h"

#include "../common/contract.h"
#include "cpu/grouped_gemm_cpu.h"

namespace dgmoe {
namespace {

Tensor grouped_gemm_nt_f8f8bf16_masked_cpu(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                                           const Tensor& b_scale, const Tensor& masked_m,
                                           int64_t expected_m, const GivenGranularity& recipe_a,
                                           const GivenGranularity& recipe_b) {
  GroupedGemmCall call = plan_grouped_gemm_nt_f8f8bf16_masked(a, a_scale, b, b_scale, masked_m,
                                                              expected_m, recipe_a, recipe_b);
  grouped_gemm_cpu("grouped_gemm_nt_f8f8bf16_masked", call.plan, a);
  return call.d;
}

void grouped_gemm_nt_f8f8bf16_masked_out_cpu(const Tensor& a, const Tensor& a_scale,
                                             const Tensor& b, const Tensor& b_scale,
                                             const Tensor& masked_m, int64_t expected_m,
                                             const GivenGranularity& recipe_a,
                                             const GivenGranularity& recipe_b, Tensor& out,
                                             const std::optional<Tensor>& workspace) {
  grouped_gemm_cpu(
      "grouped_gemm_nt_f8f8bf16_masked",
      plan_grouped_gemm_nt_f8f8bf16_masked(a, a_scale, b, b_scale, masked_m, expected_m, recipe_a,
                                           recipe_b, out, workspace)
          .plan,
      a);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) {
  m.def(dgmoe::kGroupedGemmNtF8f8bf16MaskedSchema);
  m.def(dgmoe::kGroupedGemmNtF8f8bf16MaskedOutSchema);
}
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("grouped_gemm_nt_f8f8bf16_masked", DGMOE_BOX(dgmoe::grouped_gemm_nt_f8f8bf16_masked_cpu));
  m.impl("grouped_gemm_nt_f8f8bf16_masked.out",
         DGMOE_BOX(dgmoe::grouped_gemm_nt_f8f8bf16_masked_out_cpu));
}
DGMOE_CONTRACT(grouped_gemm_nt_f8f8bf16_masked, kGroupedGemmNtF8f8bf16MaskedOutSchema)
