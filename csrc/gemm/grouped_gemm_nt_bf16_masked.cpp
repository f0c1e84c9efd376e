#include "grouped_gemm_nt_bf16_masked.h"

#include "../common/contract.h"
#include "cpu/grouped_gemm_cpu.h"

namespace dgmoe {
namespace {

Tensor grouped_gemm_nt_bf16_masked_cpu(const Tensor& a, const Tensor& b, const Tensor& masked_m,
                                       int64_t expected_m) {
  GroupedGemmCall call = plan_grouped_gemm_nt_bf16_masked(a, b, masked_m, expected_m);
  grouped_gemm_cpu("grouped_gemm_nt_bf16_masked", call.plan, a);
  return call.d;
}

void grouped_gemm_nt_bf16_masked_out_cpu(const Tensor& a, const Tensor& b, const Tensor& masked_m,
                                         int64_t expected_m, Tensor& out) {
  grouped_gemm_cpu("grouped_gemm_nt_bf16_masked",
                   plan_grouped_gemm_nt_bf16_masked(a, b, masked_m, expected_m, out).plan, a);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) {
  m.def(dgmoe::kGroupedGemmNtBf16MaskedSchema);
  m.def(dgmoe::kGroupedGemmNtBf16MaskedOutSchema);
}
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("grouped_gemm_nt_bf16_masked", DGMOE_BOX(dgmoe::grouped_gemm_nt_bf16_masked_cpu));
  m.impl("grouped_gemm_nt_bf16_masked.out", DGMOE_BOX(dgmoe::grouped_gemm_nt_bf16_masked_out_cpu));
}
DGMOE_CONTRACT(grouped_gemm_nt_bf16_masked, kGroupedGemmNtBf16MaskedOutSchema)
