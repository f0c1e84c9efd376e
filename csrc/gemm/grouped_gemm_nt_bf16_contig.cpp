#include "grouped_gemm_nt_bf16_contig.h"

#include "../common/contract.h"
#include "cpu/grouped_gemm_cpu.h"

namespace dgmoe {
namespace {

Tensor grouped_gemm_nt_bf16_contig_cpu(const Tensor& a, const Tensor& b, const Tensor& m_indices) {
  GroupedGemmCall call = plan_grouped_gemm_nt_bf16_contig(a, b, m_indices);
  grouped_gemm_cpu("grouped_gemm_nt_bf16_contig", call.plan, a);
  return call.d;
}

void grouped_gemm_nt_bf16_contig_out_cpu(const Tensor& a, const Tensor& b, const Tensor& m_indices,
                                         Tensor& out) {
  grouped_gemm_cpu("grouped_gemm_nt_bf16_contig",
                   plan_grouped_gemm_nt_bf16_contig(a, b, m_indices, out).plan, a);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) {
  m.def(dgmoe::kGroupedGemmNtBf16ContigSchema);
  m.def(dgmoe::kGroupedGemmNtBf16ContigOutSchema);
}
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("grouped_gemm_nt_bf16_contig", DGMOE_BOX(dgmoe::grouped_gemm_nt_bf16_contig_cpu));
  m.impl("grouped_gemm_nt_bf16_contig.out", DGMOE_BOX(dgmoe::grouped_gemm_nt_bf16_contig_out_cpu));
}
DGMOE_CONTRACT(grouped_gemm_nt_bf16_contig, kGroupedGemmNtBf16ContigOutSchema)
