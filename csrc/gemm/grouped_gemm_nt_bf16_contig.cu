#include "grouped_gemm_nt_bf16_contig.h"

#include "deep_gemm/deep_gemm.cuh"

namespace dgmoe {
namespace {

Tensor run(const Tensor& a, const Tensor& b, const Tensor& m_indices,
           const std::optional<Tensor>& out) {
  const CudaScope scope(a);
  GroupedGemmCall call = plan_grouped_gemm_nt_bf16_contig(a, b, m_indices, out);
  const GroupedGemmPlan& p = call.plan;
  deep_gemm(scope, {DeepGemmOp::kGroupedBf16Contig, "grouped_gemm_nt_bf16_contig", p, &a, nullptr,
                    &b, nullptr, &m_indices, &call.d});
  return call.d;
}

Tensor grouped_gemm_nt_bf16_contig_cuda(const Tensor& a, const Tensor& b, const Tensor& m_indices) {
  return run(a, b, m_indices, std::nullopt);
}

void grouped_gemm_nt_bf16_contig_out_cuda(const Tensor& a, const Tensor& b, const Tensor& m_indices,
                                          Tensor& out) {
  run(a, b, m_indices, out);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("grouped_gemm_nt_bf16_contig", DGMOE_BOX(dgmoe::grouped_gemm_nt_bf16_contig_cuda));
  m.impl("grouped_gemm_nt_bf16_contig.out", DGMOE_BOX(dgmoe::grouped_gemm_nt_bf16_contig_out_cuda));
}
