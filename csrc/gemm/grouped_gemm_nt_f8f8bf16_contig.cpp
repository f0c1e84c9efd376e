#include "grouped_gemm_nt_f8f8bf16_contig.h"

#include "../common/contract.h"
#include "cpu/grouped_gemm_cpu.h"

namespace dgmoe {
namespace {

Tensor grouped_gemm_nt_f8f8bf16_contig_cpu(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                                           const Tensor& b_scale, const Tensor& m_indices,
                                           const GivenGranularity& recipe_a,
                                           const GivenGranularity& recipe_b) {
  GroupedGemmCall call =
      plan_grouped_gemm_nt_f8f8bf16_contig(a, a_scale, b, b_scale, m_indices, recipe_a, recipe_b);
  grouped_gemm_cpu("grouped_gemm_nt_f8f8bf16_contig", call.plan, a);
  return call.d;
}

void grouped_gemm_nt_f8f8bf16_contig_out_cpu(const Tensor& a, const Tensor& a_scale,
                                             const Tensor& b, const Tensor& b_scale,
                                             const Tensor& m_indices,
                                             const GivenGranularity& recipe_a,
                                             const GivenGranularity& recipe_b, Tensor& out,
                                             const std::optional<Tensor>& workspace) {
  grouped_gemm_cpu("grouped_gemm_nt_f8f8bf16_contig",
                   plan_grouped_gemm_nt_f8f8bf16_contig(a, a_scale, b, b_scale, m_indices, recipe_a,
                                                        recipe_b, out, workspace)
                       .plan,
                   a);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) {
  m.def(dgmoe::kGroupedGemmNtF8f8bf16ContigSchema);
  m.def(dgmoe::kGroupedGemmNtF8f8bf16ContigOutSchema);
}
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("grouped_gemm_nt_f8f8bf16_contig", DGMOE_BOX(dgmoe::grouped_gemm_nt_f8f8bf16_contig_cpu));
  m.impl("grouped_gemm_nt_f8f8bf16_contig.out",
         DGMOE_BOX(dgmoe::grouped_gemm_nt_f8f8bf16_contig_out_cpu));
}
DGMOE_CONTRACT(grouped_gemm_nt_f8f8bf16_contig, kGroupedGemmNtF8f8bf16ContigOutSchema)
