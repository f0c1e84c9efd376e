// grouped_gemm_nt_f8f8bf16_masked: d = a @ b^T by expert, on a masked slab.
//   a           [experts, m, k] float8_e4m3fn, contiguous
//   a_scale     [experts, m, groups] float32, or packed UE8M0 int32, any strides
//   b           [experts, n, k] float8_e4m3fn, or [experts, n, k / 2] int8: two e2m1 codes a
//               byte, the low nibble first; contiguous
//   b_scale     [experts, ceil(n / 128), ceil(k / 128)] float32, or packed UE8M0 int32
//               [experts, n, ceil(k / 512)], any strides; for int8 b packed, ceil(k / 128) words
//   masked_m    [experts] int32 valid rows
//   expected_m  a hint at the rows an expert has, from 1 to 2^31 - 1; never changes the result
//   recipe_a, recipe_b  (rows, columns) that one scale covers, given together; default
//               (1, 128) and (128, 128), or (1, 128) twice when b_scale is packed, or (1, 128)
//               and (1, 32) for int8 b; MXFP8 is (1, 32) twice
//   out         (overload .out) contiguous buffer for the result, on 16 bytes
//   workspace   (overload .out) uint8 or int8 [bytes], on 16 bytes, for what the kernel would
//               allocate: at least GemmChoice::workspace_bytes of heuristics.h; undefined afterwards
//   ->          [experts, m, n] bfloat16; rows from masked_m[e] on are undefined
// fp32 accumulation, scales applied in fp32, one rounding to bf16.
#pragma once

#include "grouped_gemm.h"

namespace dgmoe {

constexpr char kGroupedGemmNtF8f8bf16MaskedSchema[] =
    "grouped_gemm_nt_f8f8bf16_masked(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor"
    " masked_m, SymInt expected_m, *, int[]? recipe_a=None, int[]? recipe_b=None) -> Tensor";

constexpr char kGroupedGemmNtF8f8bf16MaskedOutSchema[] =
    "grouped_gemm_nt_f8f8bf16_masked.out(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor"
    " masked_m, SymInt expected_m, *, int[]? recipe_a=None, int[]? recipe_b=None, Tensor(a!) out, "
    "Tensor(b!)?"
    " workspace=None) -> ()";

inline GroupedGemmCall plan_grouped_gemm_nt_f8f8bf16_masked(
    const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
    const Tensor& masked_m, int64_t expected_m, const GivenGranularity& recipe_a,
    const GivenGranularity& recipe_b, const std::optional<Tensor>& out = {},
    const std::optional<Tensor>& workspace = {}) {
  const Check check("grouped_gemm_nt_f8f8bf16_masked");
  GroupedGemmPlan plan =
      plan_operands(check, a, b, ScalarType::Float8_e4m3fn, GemmLayout::kMasked, true);
  plan_scales(check, plan, a, a_scale, b_scale, recipe_a, recipe_b);
  check.at_least("expected_m", expected_m, 1);
  check.count("expected_m", expected_m);
  plan.expected_m = expected_m;
  plan_rows(check, plan, a, "masked_m", masked_m);
  const std::vector<NamedTensor> inputs{
      {"a", a}, {"a_scale", a_scale}, {"b", b}, {"b_scale", b_scale}, {"masked_m", masked_m}};
  std::vector<NamedTensor> others = inputs;
  if (out.has_value()) others.push_back({"out", *out});
  const std::optional<Tensor> given = given_workspace(check, workspace, others);
  GroupedGemmCall call = plan_output(check, plan, ScalarType::BFloat16, out, inputs);
  call.workspace = given;
  return call;
}

}  // namespace dgmoe
