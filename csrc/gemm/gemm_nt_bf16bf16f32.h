// gemm_nt_bf16bf16f32: d = a @ b^T, bfloat16 operands, float32 result.
//   a    [m, k] bfloat16, contiguous
//   b    [n, k] bfloat16, contiguous
//   out  (overload .out) contiguous buffer for the result, on 16 bytes
//   ->   [m, n] float32
// fp32 accumulation, no further rounding.
#pragma once

#include "grouped_gemm.h"

namespace dgmoe {

constexpr char kGemmNtBf16bf16f32Schema[] = "gemm_nt_bf16bf16f32(Tensor a, Tensor b) -> Tensor";

constexpr char kGemmNtBf16bf16f32OutSchema[] =
    "gemm_nt_bf16bf16f32.out(Tensor a, Tensor b, *, Tensor(a!) out) -> ()";

inline GroupedGemmCall plan_gemm_nt_bf16bf16f32(const Tensor& a, const Tensor& b,
                                                const std::optional<Tensor>& out = {}) {
  const Check check("gemm_nt_bf16bf16f32");
  GroupedGemmPlan plan = plan_operands(check, a, b, ScalarType::BFloat16, GemmLayout::kDense);
  return plan_output(check, plan, ScalarType::Float, out, {{"a", a}, {"b", b}});
}

}  // namespace dgmoe
