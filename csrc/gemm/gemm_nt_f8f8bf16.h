// gemm_nt_f8f8bf16: d = a @ b^T, e4m3 operands with block scales.
//   a           [m, k] float8_e4m3fn, contiguous
//   a_scale     [m, groups] float32, or packed UE8M0 int32, any strides
//   b           [n, k] float8_e4m3fn, contiguous
//   b_scale     [ceil(n / 128), ceil(k / 128)] float32, or packed UE8M0 int32
//               [n, ceil(k / 512)], any strides
//   recipe_a, recipe_b  (rows, columns) that one scale covers, given together; default
//               (1, 128) and (128, 128), or (1, 128) twice when b_scale is packed
//   out         (overload .out) contiguous buffer for the result, on 16 bytes
//   ->          [m, n] bfloat16
// fp32 accumulation, scales applied in fp32, one rounding to bf16.
#pragma once

#include "grouped_gemm.h"

namespace dgmoe {

constexpr char kGemmNtF8f8bf16Schema[] =
    "gemm_nt_f8f8bf16(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, *, int[]?"
    " recipe_a=None, int[]? recipe_b=None) -> Tensor";

constexpr char kGemmNtF8f8bf16OutSchema[] =
    "gemm_nt_f8f8bf16.out(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, *, int[]?"
    " recipe_a=None, int[]? recipe_b=None, Tensor(a!) out) -> ()";

inline GroupedGemmCall plan_gemm_nt_f8f8bf16(const Tensor& a, const Tensor& a_scale,
                                             const Tensor& b, const Tensor& b_scale,
                                             const GivenGranularity& recipe_a,
                                             const GivenGranularity& recipe_b,
                                             const std::optional<Tensor>& out = {}) {
  const Check check("gemm_nt_f8f8bf16");
  GroupedGemmPlan plan = plan_operands(check, a, b, ScalarType::Float8_e4m3fn, GemmLayout::kDense);
  plan_scales(check, plan, a, a_scale, b_scale, recipe_a, recipe_b);
  return plan_output(check, plan, ScalarType::BFloat16, out,
                     {{"a", a}, {"a_scale", a_scale}, {"b", b}, {"b_scale", b_scale}});
}

}  // namespace dgmoe
