#include "gemm_nt_f8f8bf16.h"

#include "../common/contract.h"
#include "cpu/grouped_gemm_cpu.h"

namespace dgmoe {
namespace {

Tensor gemm_nt_f8f8bf16_cpu(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                            const Tensor& b_scale, const GivenGranularity& recipe_a,
                            const GivenGranularity& recipe_b) {
  GroupedGemmCall call = plan_gemm_nt_f8f8bf16(a, a_scale, b, b_scale, recipe_a, recipe_b);
  grouped_gemm_cpu("gemm_nt_f8f8bf16", call.plan, a);
  return call.d;
}

void gemm_nt_f8f8bf16_out_cpu(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                              const Tensor& b_scale, const GivenGranularity& recipe_a,
                              const GivenGranularity& recipe_b, Tensor& out) {
  grouped_gemm_cpu("gemm_nt_f8f8bf16",
                   plan_gemm_nt_f8f8bf16(a, a_scale, b, b_scale, recipe_a, recipe_b, out).plan, a);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) {
  m.def(dgmoe::kGemmNtF8f8bf16Schema);
  m.def(dgmoe::kGemmNtF8f8bf16OutSchema);
}
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("gemm_nt_f8f8bf16", DGMOE_BOX(dgmoe::gemm_nt_f8f8bf16_cpu));
  m.impl("gemm_nt_f8f8bf16.out", DGMOE_BOX(dgmoe::gemm_nt_f8f8bf16_out_cpu));
}
DGMOE_CONTRACT(gemm_nt_f8f8bf16, kGemmNtF8f8bf16OutSchema)
