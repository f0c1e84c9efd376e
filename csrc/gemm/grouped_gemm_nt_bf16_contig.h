// grouped_gemm_nt_bf16_contig: d = a @ b^T by expert, on contiguous segments.
//   a           [m, k] bfloat16, contiguous
//   b           [experts, n, k] bfloat16, contiguous
//   m_indices   [m] int32 expert of each row, or -1; an expert's rows are consecutive, before
//               its padding
//   out         (overload .out) contiguous buffer for the result, on 16 bytes
//   ->          [m, n] bfloat16; rows with m_indices -1 are undefined
// fp32 accumulation, one rounding to bf16.
#pragma once

#include "grouped_gemm.h"

namespace dgmoe {

constexpr char kGroupedGemmNtBf16ContigSchema[] =
    "grouped_gemm_nt_bf16_contig(Tensor a, Tensor b, Tensor m_indices) -> Tensor";

constexpr char kGroupedGemmNtBf16ContigOutSchema[] =
    "grouped_gemm_nt_bf16_contig.out(Tensor a, Tensor b, Tensor m_indices, *, Tensor(a!)"
    " out) -> ()";

inline GroupedGemmCall plan_grouped_gemm_nt_bf16_contig(const Tensor& a, const Tensor& b,
                                                        const Tensor& m_indices,
                                                        const std::optional<Tensor>& out = {}) {
  const Check check("grouped_gemm_nt_bf16_contig");
  GroupedGemmPlan plan = plan_operands(check, a, b, ScalarType::BFloat16, GemmLayout::kContig);
  plan_rows(check, plan, a, "m_indices", m_indices);
  return plan_output(check, plan, ScalarType::BFloat16, out,
                     {{"a", a}, {"b", b}, {"m_indices", m_indices}});
}

}  // namespace dgmoe
