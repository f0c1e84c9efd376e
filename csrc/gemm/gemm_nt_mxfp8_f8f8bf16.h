// gemm_nt_mxfp8_f8f8bf16: d = a @ b^T, e4m3 operands with a power-of-two scale a 32 columns.
//   a           [m, k] float8_e4m3fn, contiguous
//   a_scale     [m, ceil(k / 32)] float32 powers of two, or packed UE8M0 int32
//               [m, ceil(k / 128)], any strides
//   b           [n, k] float8_e4m3fn, contiguous
//   b_scale     as a_scale, for n rows
//   out         (overload .out) contiguous buffer for the result, on 16 bytes
//   ->          [m, n] bfloat16
// fp32 accumulation, scales applied in fp32, one rounding to bf16. That fp32 scales are powers of
// two is not checked: a device may read only their exponents.
#pragma once

#include "grouped_gemm.h"

namespace dgmoe {

constexpr char kGemmNtMxfp8F8f8bf16Schema[] =
    "gemm_nt_mxfp8_f8f8bf16(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale) -> Tensor";

constexpr char kGemmNtMxfp8F8f8bf16OutSchema[] =
    "gemm_nt_mxfp8_f8f8bf16.out(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, *,"
    " Tensor(a!) out) -> ()";

inline GroupedGemmCall plan_gemm_nt_mxfp8_f8f8bf16(const Tensor& a, const Tensor& a_scale,
                                                   const Tensor& b, const Tensor& b_scale,
                                                   const std::optional<Tensor>& out = {}) {
  const Check check("gemm_nt_mxfp8_f8f8bf16");
  GroupedGemmPlan plan = plan_operands(check, a, b, ScalarType::Float8_e4m3fn, GemmLayout::kDense);
  const Granularity grain{1, 32};
  plan_scales(check, plan, a, a_scale, b_scale, grain, grain);
  return plan_output(check, plan, ScalarType::BFloat16, out,
                     {{"a", a}, {"a_scale", a_scale}, {"b", b}, {"b_scale", b_scale}});
}

}  // namespace dgmoe
