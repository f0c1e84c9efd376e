// grouped_gemm_nt_bf16_masked: d = a @ b^T by expert, on a masked slab.
//   a           [experts, m, k] bfloat16, contiguous
//   b           [experts, n, k] bfloat16, contiguous
//   masked_m    [experts] int32 valid rows
//   expected_m  a hint at the rows an expert has, from 1 to 2^31 - 1; never changes the result
//   out         (overload .out) contiguous buffer for the result, on 16 bytes
//   ->          [experts, m, n] bfloat16; rows from masked_m[e] on are undefined
// fp32 accumulation, one rounding to bf16.
#pragma once

#include "grouped_gemm.h"

namespace dgmoe {

constexpr char kGroupedGemmNtBf16MaskedSchema[] =
    "grouped_gemm_nt_bf16_masked(Tensor a, Tensor b, Tensor masked_m, SymInt expected_m) ->"
    " Tensor";

constexpr char kGroupedGemmNtBf16MaskedOutSchema[] =
    "grouped_gemm_nt_bf16_masked.out(Tensor a, Tensor b, Tensor masked_m, SymInt"
    " expected_m, *, Tensor(a!) out) -> ()";

inline GroupedGemmCall plan_grouped_gemm_nt_bf16_masked(const Tensor& a, const Tensor& b,
                                                        const Tensor& masked_m, int64_t expected_m,
                                                        const std::optional<Tensor>& out = {}) {
  const Check check("grouped_gemm_nt_bf16_masked");
  GroupedGemmPlan plan = plan_operands(check, a, b, ScalarType::BFloat16, GemmLayout::kMasked);
  check.at_least("expected_m", expected_m, 1);
  check.count("expected_m", expected_m);
  plan.expected_m = expected_m;
  plan_rows(check, plan, a, "masked_m", masked_m);
  return plan_output(check, plan, ScalarType::BFloat16, out,
                     {{"a", a}, {"b", b}, {"masked_m", masked_m}});
}

}  // namespace dgmoe
