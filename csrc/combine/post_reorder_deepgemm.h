// post_reorder_deepgemm: weigh each token's expert outputs, sum in top-k order, scale, reorder.
//   y                      [rows, columns] or [experts, m, columns] bfloat16, any strides
//   src2dst                [tokens, top_k] int32 or int64 row of y (of experts * m), or -1
//   topk_weights           [tokens, top_k] float32, bfloat16 or float16
//   routed_scaling_factor  multiplies the fp32 sum; 0, or normal as float32
//   hidden_size            columns of the result, default all of y
//   bias                   [experts, >= hidden_size] float32 or bfloat16 of the GEMM that made y,
//                          any strides: added to each row of y in fp32, before its weight
//   topk_ids               [tokens, top_k] int32 or int64; whose bias a slot takes, needed with
//                          one. An id outside expert_start .. expert_start + experts has none
//   out                    (overload .out) contiguous buffer for the result, on 16 bytes
//   ->                     [tokens, hidden_size] bfloat16; a token without a row is exactly 0
// fp32 fused multiply-adds in slot order, one rounding. No atomics.
#pragma once

#include "weighted_rows.h"

namespace dgmoe {

constexpr char kPostReorderDeepgemmSchema[] =
    "post_reorder_deepgemm(Tensor y, Tensor src2dst, Tensor topk_weights, *, float"
    " routed_scaling_factor=1.0, SymInt? hidden_size=None, Tensor? bias=None, Tensor?"
    " topk_ids=None, SymInt expert_start=0) -> Tensor";

constexpr char kPostReorderDeepgemmOutSchema[] =
    "post_reorder_deepgemm.out(Tensor y, Tensor src2dst, Tensor topk_weights, *, float"
    " routed_scaling_factor=1.0, SymInt? hidden_size=None, Tensor? bias=None, Tensor?"
    " topk_ids=None, SymInt expert_start=0, Tensor(a!) out) -> ()";

inline WeightedRowsCall plan_post_reorder_deepgemm(
    const Tensor& y, const Tensor& src2dst, const Tensor& topk_weights,
    double routed_scaling_factor, std::optional<int64_t> hidden_size,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& topk_ids, int64_t expert_start,
    const std::optional<Tensor>& out = {}) {
  const Check check("post_reorder_deepgemm");
  if (y.dim() != 3) check.dim("y", y, 2, "(rows, hidden) or (experts, m, hidden)");
  std::vector<NamedTensor> others;
  if (topk_ids.has_value()) {
    others.push_back({"topk_ids", *topk_ids});
    check.expert_ids("topk_ids", *topk_ids, "y", y);
    check.that(src2dst.dim() == 2 && topk_ids->size(0) == src2dst.size(0) &&
                   topk_ids->size(1) == src2dst.size(1),
               "topk_ids", "have the shape of src2dst, " + shape_text(src2dst),
               shape_text(*topk_ids));
  }
  check.count("expert_start", expert_start);
  if (bias.has_value()) {
    check.dtype("bias", *bias, {ScalarType::Float, ScalarType::BFloat16});
    check.dim("bias", *bias, 2, "(experts, hidden)");
    check.same_device("bias", *bias, "y", y);
    const int64_t least = hidden_size.value_or(y.size(y.dim() - 1));
    check.that(bias->size(1) >= least, "bias",
               "have at least the columns of the result, " + std::to_string(least),
               shape_text(*bias));
    check.that(topk_ids.has_value(), "topk_ids", "be given with a bias", "None");
    others.push_back({"bias", *bias});
  }
  WeightedRowsCall call =
      plan_weighted_rows(check, y, "src2dst", src2dst, std::nullopt, topk_weights,
                         routed_scaling_factor, hidden_size, out, others);
  if (bias.has_value()) {
    call.bias = with_aligned_rows(check.op(), "bias", *bias);
    call.plan.bias = {data_of(*call.bias),  dtype_of(*bias) == ScalarType::Float,
                      bias->size(0),        call.bias->stride(0),
                      id_matrix(*topk_ids), expert_start};
  }
  return call;
}

}  // namespace dgmoe
