// post_reorder_deepgemm: weigh each token's expert outputs, sum in top-k order, scale, reorder.
//   y                      [rows, columns] or [experts, m, columns] bfloat16, any strides
//   src2dst                [tokens, top_k] int32 or int64 row of y (of experts * m), or -1
//   topk_weights           [tokens, top_k] float32, bfloat16 or float16
//   routed_scaling_factor  multiplies the fp32 sum
//   hidden_size            columns of the result, default all of y
//   out                    (overload .out) contiguous buffer for the result, on 16 bytes
//   ->                     [tokens, hidden_size] bfloat16; a token without a row is exactly 0
// fp32 fused multiply-adds in slot order, one rounding. No atomics.
#pragma once

#include "weighted_rows.h"

namespace dgmoe {

constexpr char kPostReorderDeepgemmSchema[] =
    "post_reorder_deepgemm(Tensor y, Tensor src2dst, Tensor topk_weights, *, float"
    " routed_scaling_factor=1.0, SymInt? hidden_size=None) -> Tensor";

constexpr char kPostReorderDeepgemmOutSchema[] =
    "post_reorder_deepgemm.out(Tensor y, Tensor src2dst, Tensor topk_weights, *, float"
    " routed_scaling_factor=1.0, SymInt? hidden_size=None, Tensor(a!) out) -> ()";

inline WeightedRowsCall plan_post_reorder_deepgemm(const Tensor& y, const Tensor& src2dst,
                                                   const Tensor& topk_weights,
                                                   double routed_scaling_factor,
                                                   std::optional<int64_t> hidden_size,
                                                   const std::optional<Tensor>& out = {}) {
  const Check check("post_reorder_deepgemm");
  return plan_weighted_rows(check, y, "src2dst", src2dst, std::nullopt, topk_weights,
                            routed_scaling_factor, hidden_size, out);
}

}  // namespace dgmoe
