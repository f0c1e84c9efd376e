#include "gemm_nt_bf16bf16f32.h"

#include "deep_gemm/deep_gemm.cuh"

namespace dgmoe {
namespace {

Tensor run(const Tensor& a, const Tensor& b, const std::optional<Tensor>& out) {
  const CudaScope scope(a);
  GroupedGemmCall call = plan_gemm_nt_bf16bf16f32(a, b, out);
  const GroupedGemmPlan& p = call.plan;
  deep_gemm(scope, {DeepGemmOp::kBf16F32, "gemm_nt_bf16bf16f32", p, &a, nullptr, &b, nullptr,
                    nullptr, &call.d});
  return call.d;
}

Tensor gemm_nt_bf16bf16f32_cuda(const Tensor& a, const Tensor& b) {
  return run(a, b, std::nullopt);
}

void gemm_nt_bf16bf16f32_out_cuda(const Tensor& a, const Tensor& b, Tensor& out) { run(a, b, out); }

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("gemm_nt_bf16bf16f32", DGMOE_BOX(dgmoe::gemm_nt_bf16bf16f32_cuda));
  m.impl("gemm_nt_bf16bf16f32.out", DGMOE_BOX(dgmoe::gemm_nt_bf16bf16f32_out_cuda));
}
