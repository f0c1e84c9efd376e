#include "grouped_gemm_nt_f8f8bf16_contig.h"

#include "deep_gemm/deep_gemm.cuh"
#include "sm90/mx_grouped_gemm.cuh"

namespace dgmoe {
namespace {

using Recipe = std::optional<std::vector<int64_t>>;

Tensor run(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
           const Tensor& m_indices, const Recipe& recipe_a, const Recipe& recipe_b,
           const std::optional<Tensor>& out) {
  const CudaScope scope(a);
  GroupedGemmCall call = plan_grouped_gemm_nt_f8f8bf16_contig(a, a_scale, b, b_scale, m_indices,
                                                              recipe_a, recipe_b, out);
  const GroupedGemmPlan& p = call.plan;
  if (run_mx_grouped_gemm(scope, p, call.d)) return call.d;
  // The library's own default is not that of FP4.
  const bool named = recipe_a.has_value() || p.b_fp4;
  deep_gemm(scope, {DeepGemmOp::kGroupedF8Contig, "grouped_gemm_nt_f8f8bf16_contig", &a, &a_scale,
                    &b, &b_scale, &m_indices, p.experts, p.m, p.n, p.k, 0, named ? p.a_gran_k : 0,
                    named ? p.b_gran_mn : 0, named ? p.b_gran_k : 0, 0, &call.d, nullptr});
  return call.d;
}

Tensor grouped_gemm_nt_f8f8bf16_contig_cuda(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                                            const Tensor& b_scale, const Tensor& m_indices,
                                            const Recipe& recipe_a, const Recipe& recipe_b) {
  return run(a, a_scale, b, b_scale, m_indices, recipe_a, recipe_b, std::nullopt);
}

void grouped_gemm_nt_f8f8bf16_contig_out_cuda(const Tensor& a, const Tensor& a_scale,
                                              const Tensor& b, const Tensor& b_scale,
                                              const Tensor& m_indices, const Recipe& recipe_a,
                                              const Recipe& recipe_b, Tensor& out) {
  run(a, a_scale, b, b_scale, m_indices, recipe_a, recipe_b, out);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("grouped_gemm_nt_f8f8bf16_contig", DGMOE_BOX(dgmoe::grouped_gemm_nt_f8f8bf16_contig_cuda));
  m.impl("grouped_gemm_nt_f8f8bf16_contig.out",
         DGMOE_BOX(dgmoe::grouped_gemm_nt_f8f8bf16_contig_out_cuda));
}
