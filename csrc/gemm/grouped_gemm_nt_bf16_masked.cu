#include "grouped_gemm_nt_bf16_masked.h"

#include "deep_gemm/deep_gemm.cuh"

namespace dgmoe {
namespace {

Tensor run(const Tensor& a, const Tensor& b, const Tensor& masked_m, int64_t expected_m,
           const std::optional<Tensor>& out) {
  const CudaScope scope(a);
  GroupedGemmCall call = plan_grouped_gemm_nt_bf16_masked(a, b, masked_m, expected_m, out);
  const GroupedGemmPlan& p = call.plan;
  deep_gemm(scope, {DeepGemmOp::kGroupedBf16Masked, "grouped_gemm_nt_bf16_masked", p, &a, nullptr,
                    &b, nullptr, &masked_m, &call.d});
  return call.d;
}

Tensor grouped_gemm_nt_bf16_masked_cuda(const Tensor& a, const Tensor& b, const Tensor& masked_m,
                                        int64_t expected_m) {
  return run(a, b, masked_m, expected_m, std::nullopt);
}

void grouped_gemm_nt_bf16_masked_out_cuda(const Tensor& a, const Tensor& b, const Tensor& masked_m,
                                          int64_t expected_m, Tensor& out) {
  run(a, b, masked_m, expected_m, out);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("grouped_gemm_nt_bf16_masked", DGMOE_BOX(dgmoe::grouped_gemm_nt_bf16_masked_cuda));
  m.impl("grouped_gemm_nt_bf16_masked.out", DGMOE_BOX(dgmoe::grouped_gemm_nt_bf16_masked_out_cuda));
}
