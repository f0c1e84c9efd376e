// grouped_gemm_nt_f8f8bf16_contig: d = a @ b^T by expert, on contiguous segments.
//   a           [m, k] float8_e4m3fn, contiguous
//   a_scale     [m, groups] float32, or packed UE8M0 int32, any strides
//   b           [experts, n, k] float8_e4m3fn, or [experts, n, k / 2] int8: two e2m1 codes a
//               byte, the low nibble first; contiguous
//   b_scale     [experts, ceil(n / 128), ceil(k / 128)] float32, or packed UE8M0 int32
//               [experts, n, ceil(k / 512)], any strides; for int8 b packed, ceil(k / 128) words
//   m_indices   [m] int32 expert of each row, or -1; an expert's rows are consecutive, before
//               its padding
//   recipe_a, recipe_b  (rows, columns) that one scale covers, given together; default
//               (1, 128) and (128, 128), or (1, 128) twice when b_scale is packed, or (1, 128)
//               and (1, 32) for int8 b; MXFP8 is (1, 32) twice
//   out         (overload .out) contiguous buffer for the result, on 16 bytes
//   workspace   (overload .out) uint8 or int8 [bytes], on 16 bytes, for what the kernel would
//               allocate: at least GemmChoice::workspace_bytes of heuristics.h; undefined afterwards
//   ->          [m, n] bfloat16; rows with m_indices -1 are undefined
// fp32 accumulation, scales applied in fp32, one rounding to bf16.
#pragma once

#include "grouped_gemm.h"

namespace dgmoe {

constexpr char kGroupedGemmNtF8f8bf16ContigSchema[] =
    "grouped_gemm_nt_f8f8bf16_contig(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor"
    " m_indices, *, int[]? recipe_a=None, int[]? recipe_b=None) -> Tensor";

constexpr char kGroupedGemmNtF8f8bf16ContigOutSchema[] =
    "grouped_gemm_nt_f8f8bf16_contig.out(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor"
    " m_indices, *, int[]? recipe_a=None, int[]? recipe_b=None, Tensor(a!) out, Tensor(b!)?"
    " workspace=None) -> ()";

inline GroupedGemmCall plan_grouped_gemm_nt_f8f8bf16_contig(
    const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
    const Tensor& m_indices, const GivenGranularity& recipe_a, const GivenGranularity& recipe_b,
    const std::optional<Tensor>& out = {}, const std::optional<Tensor>& workspace = {}) {
  const Check check("grouped_gemm_nt_f8f8bf16_contig");
  GroupedGemmPlan plan =
      plan_operands(check, a, b, ScalarType::Float8_e4m3fn, GemmLayout::kContig, true);
  plan_scales(check, plan, a, a_scale, b_scale, recipe_a, recipe_b);
  plan_rows(check, plan, a, "m_indices", m_indices);
  const std::vector<NamedTensor> inputs{
      {"a", a}, {"a_scale", a_scale}, {"b", b}, {"b_scale", b_scale}, {"m_indices", m_indices}};
  std::vector<NamedTensor> others = inputs;
  if (out.has_value()) others.push_back({"out", *out});
  const std::optional<Tensor> given = given_workspace(check, workspace, others);
  GroupedGemmCall call = plan_output(check, plan, ScalarType::BFloat16, out, inputs);
  call.workspace = given;
  return call;
}

}  // namespace dgmoe
