#include "gemm_nt_bf16bf16f32.h"

#include "../common/contract.h"
#include "cpu/grouped_gemm_cpu.h"

namespace dgmoe {
namespace {

Tensor gemm_nt_bf16bf16f32_cpu(const Tensor& a, const Tensor& b) {
  GroupedGemmCall call = plan_gemm_nt_bf16bf16f32(a, b);
  grouped_gemm_cpu("gemm_nt_bf16bf16f32", call.plan, a);
  return call.d;
}

void gemm_nt_bf16bf16f32_out_cpu(const Tensor& a, const Tensor& b, Tensor& out) {
  grouped_gemm_cpu("gemm_nt_bf16bf16f32", plan_gemm_nt_bf16bf16f32(a, b, out).plan, a);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) {
  m.def(dgmoe::kGemmNtBf16bf16f32Schema);
  m.def(dgmoe::kGemmNtBf16bf16f32OutSchema);
}
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("gemm_nt_bf16bf16f32", DGMOE_BOX(dgmoe::gemm_nt_bf16bf16f32_cpu));
  m.impl("gemm_nt_bf16bf16f32.out", DGMOE_BOX(dgmoe::gemm_nt_bf16bf16f32_out_cpu));
}
DGMOE_CONTRACT(gemm_nt_bf16bf16f32, kGemmNtBf16bf16f32OutSchema)
