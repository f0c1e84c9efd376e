// What the grouped GEMMs and the dense ones share: d[rows of e] = a[rows of e] @ b[e]^T, fp32
// accumulation, one rounding to bf16 or none. A dense GEMM is one expert that owns every row.
// Checks of the operands, and the plan that kernels work from.
#pragma once

#include <array>

#include "../common/output.h"
#include "heuristics.h"

namespace dgmoe {

// What the caller names of a scale's granularity: {rows, columns}.
using GivenGranularity = std::optional<std::vector<int64_t>>;

struct GroupedGemmPlan : GroupedGemmSpec {
  const void* a;         // e4m3 bytes or bf16, contiguous
  ScaleStrides a_scale;  // with a_scale_data null for bf16
  const void* a_scale_data;
  const void* b;  // as a, or two e2m1 codes a byte where b_fp4: rows of k / 2 bytes
  ScaleStrides b_scale;
  const void* b_scale_data;
  const int32_t* row_info;  // masked_m [E] or m_indices [m]; null for a dense GEMM
  void* d;                  // bf16, or fp32 where d_fp32
  bool d_fp32;
};

struct GroupedGemmCall {
  Tensor d;  // the caller's buffer where one was given
  GroupedGemmPlan plan;
  std::optional<Tensor> workspace;  // likewise, checked but for its size
};

inline Granularity granularity(const Check& check, const char* arg, const GivenGranularity& recipe,
                               Granularity fallback) {
  if (!recipe.has_value()) return fallback;
  const auto& r = *recipe;
  const bool legal = r.size() == 2 && (r[0] == 1 || r[0] == 128) && (r[1] == 32 || r[1] == 128);
  check.that(legal, arg, "be (1 or 128 rows, 32 or 128 columns)",
             r.size() == 2 ? "(" + std::to_string(r[0]) + ", " + std::to_string(r[1]) + ")"
                           : std::to_string(r.size()) + " numbers");
  return {r[0], r[1]};
}

// int8 rows of b hold two e2m1 codes a byte, so half the columns of a.
inline void check_fp4_columns(const Check& check, const Tensor& a, const Tensor& b) {
  const int64_t k = a.size(a.dim() - 1);
  if (k % 2 == 0 && b.size(b.dim() - 1) == k / 2) return;
  const std::string of_b = " for int8 b " + shape_text(b) + ", two e2m1 codes a byte";
  check.that(k % 2 == 0, "a", "have an even number of columns" + of_b, shape_text(a));
  check.that(false, "b",
             "have k / 2 = " + std::to_string(k / 2) +
                 " columns as int8, two e2m1 codes a byte,"
                 " for a " +
                 shape_text(a),
             shape_text(b));
}

// Shapes and dtypes of a and b. `fp4` says that the op also takes packed FP4 as b.
inline GroupedGemmPlan plan_operands(const Check& check, const Tensor& a, const Tensor& b,
                                     ScalarType dtype, GemmLayout layout, bool fp4 = false) {
  const bool masked = layout == GemmLayout::kMasked;
  const bool dense = layout == GemmLayout::kDense;
  check.dtype("a", a, {dtype});
  if (fp4) {
    check.dtype("b", b, {dtype, ScalarType::Char});
  } else {
    check.dtype("b", b, {dtype});
  }
  const bool b_fp4 = dtype_of(b) == ScalarType::Char;
  check.dim("a", a, masked ? 3 : 2, masked ? "(experts, m, k)" : "(m, k)");
  check.dim("b", b, dense ? 2 : 3, dense ? "(n, k)" : "(experts, n, k)");
  check.same_device("b", b, "a", a);
  if (masked) check.size("b", b, 0, a.size(0), "the experts of a");
  if (b_fp4) {
    check_fp4_columns(check, a, b);
  } else {
    check.size("b", b, b.dim() - 1, a.size(a.dim() - 1), "k of a");
  }
  check.contiguous("a", a);
  check.contiguous("b", b);
  GroupedGemmPlan plan{};
  plan.a = data_of(a);
  plan.b = data_of(b);
  plan.b_fp4 = b_fp4;
  plan.experts = dense ? 1 : b.size(0);
  plan.m = a.size(a.dim() - 2);
  plan.n = b.size(b.dim() - 2);
  plan.k = a.size(a.dim() - 1);
  plan.layout = layout;
  return plan;
}

inline void plan_scales(const Check& check, GroupedGemmPlan& plan, const Tensor& a,
                        const Tensor& a_scale, const Tensor& b_scale, Granularity grain_a,
                        Granularity grain_b) {
  check.same_device("a_scale", a_scale, "a", a);
  check.same_device("b_scale", b_scale, "a", a);
  const int64_t a_groups = ceil_div(plan.k, grain_a.k);
  const int64_t b_groups = ceil_div(plan.k, grain_b.k);
  if (plan.masked()) {
    check.dim("a_scale", a_scale, 3, "(experts, m, groups)");
    check.size("a_scale", a_scale, 0, plan.experts, "the experts of a");
  }
  check.scale("a_scale", a_scale, plan.masked() ? 3 : 2, plan.m, a_groups, "a");
  const bool dense = plan.layout == GemmLayout::kDense;
  if (!dense) {
    check.dim("b_scale", b_scale, 3, "(experts, n / granularity, groups)");
    check.size("b_scale", b_scale, 0, plan.experts, "the experts of b");
  }
  check.scale("b_scale", b_scale, dense ? 2 : 3, ceil_div(plan.n, grain_b.mn), b_groups, "b");
  plan.a_scale = scale_strides_of(a_scale, a_groups);
  plan.a_scale_data = data_of(a_scale);
  plan.a_gran_k = grain_a.k;
  plan.b_scale = scale_strides_of(b_scale, b_groups);
  plan.b_scale_data = data_of(b_scale);
  plan.b_gran_mn = grain_b.mn;
  plan.b_gran_k = grain_b.k;
}

// The same where the caller may name the recipes.
inline void plan_scales(const Check& check, GroupedGemmPlan& plan, const Tensor& a,
                        const Tensor& a_scale, const Tensor& b_scale,
                        const GivenGranularity& recipe_a, const GivenGranularity& recipe_b) {
  check.that(recipe_a.has_value() == recipe_b.has_value(), "recipe_a",
             "be given together with recipe_b",
             recipe_a.has_value() ? "recipe_a alone" : "recipe_b alone");
  // int32 weight scales are UE8M0 a row of b; fp32 ones a 128x128 block. FP4 has MX groups.
  const bool b_packed = dtype_of(b_scale) == ScalarType::Int;
  const Granularity fallback_b{b_packed ? 1 : 128, plan.b_fp4 ? 32 : 128};
  const Granularity grain_a = granularity(check, "recipe_a", recipe_a, {1, 128});
  const Granularity grain_b = granularity(check, "recipe_b", recipe_b, fallback_b);
  check.that(grain_a.mn == 1, "recipe_a", "have one scale a row", grain_a.mn);
  if (plan.b_fp4) {
    check.that(b_packed, "b_scale", "be packed UE8M0 int32 for int8 b, which holds e2m1 codes",
               dtype_name(dtype_of(b_scale)));
    check.that(grain_b.mn == 1, "recipe_b", "have one scale a row for int8 b", grain_b.mn);
  }
  plan_scales(check, plan, a, a_scale, b_scale, grain_a, grain_b);
}

// Which rows belong to which expert.
inline void plan_rows(const Check& check, GroupedGemmPlan& plan, const Tensor& a,
                      const char* info_arg, const Tensor& info) {
  check.dtype(info_arg, info, {ScalarType::Int});
  check.dim(info_arg, info, 1, plan.masked() ? "(experts,)" : "(m,)");
  check.size(info_arg, info, 0, plan.masked() ? plan.experts : plan.m,
             plan.masked() ? "the experts of a" : "the rows of a");
  check.same_device(info_arg, info, "a", a);
  check.contiguous(info_arg, info);
  if (plan.masked()) {
    check.counts(info_arg, info, "rows", plan.m);
  } else {
    check.indices(info_arg, info, "experts", plan.experts);
  }
  plan.row_info = static_cast<const int32_t*>(data_of(info));
}

// The output; the last step, since it may allocate. `inputs` are all tensors of the call, a first.
inline GroupedGemmCall plan_output(const Check& check, GroupedGemmPlan plan, ScalarType dtype,
                                   const std::optional<Tensor>& out,
                                   const std::vector<NamedTensor>& inputs) {
  const Sizes sizes = plan.masked() ? Sizes{plan.experts, plan.m, plan.n} : Sizes{plan.m, plan.n};
  Tensor d = given_or_empty(check, "out", out, sizes, dtype, inputs);
  plan.d = mutable_data_of(d);
  plan.d_fp32 = dtype == ScalarType::Float;
  return {d, plan, {}};
}

// A workspace that the caller gave; its contents are undefined afterwards. `others` are all other
// tensors of the call, a first. How large it must be depends on the device.
inline std::optional<Tensor> given_workspace(const Check& check,
                                             const std::optional<Tensor>& workspace,
                                             const std::vector<NamedTensor>& others) {
  if (!workspace.has_value()) return workspace;
  check.dtype("workspace", *workspace, {ScalarType::Byte, ScalarType::Char});
  check.dim("workspace", *workspace, 1, "(bytes,)");
  check.contiguous("workspace", *workspace);
  check.same_device("workspace", *workspace, others.front().arg, others.front().tensor);
  check.that(reinterpret_cast<uintptr_t>(data_of(*workspace)) % 16 == 0, "workspace",
             "start on 16 bytes", "another address");
  for (const NamedTensor& other : others) {
    check.that(!may_overlap(*workspace, other.tensor), "workspace",
               std::string("share no memory with ") + other.arg, "a tensor that does");
  }
  return workspace;
}

}  // namespace dgmoe
