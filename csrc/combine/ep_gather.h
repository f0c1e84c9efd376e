// ep_gather: the way back of segments that came from a dispatcher: weigh, sum, arrival order.
//   y             [rows, columns] bfloat16, any strides
//   topk_ids      [tokens, top_k] int32 or int64 local expert; negative is not here
//   topk_weights  [tokens, top_k] float32, bfloat16 or float16
//   output_index  [tokens, top_k] int32 or int64 row of y, or -1
//   hidden_size   columns of the result, default all of y
//   ->            [tokens, hidden_size] bfloat16; a token without a row is exactly 0
// A slot counts where neither its id nor its row is negative. fp32 fused multiply-adds in slot
// order, one rounding.
#pragma once

#include "weighted_rows.h"

namespace dgmoe {

constexpr char kEpGatherSchema[] =
    "ep_gather(Tensor y, Tensor topk_ids, Tensor topk_weights, Tensor output_index, *, SymInt?"
    " hidden_size=None) -> Tensor";

inline WeightedRowsCall plan_ep_gather(const Tensor& y, const Tensor& topk_ids,
                                       const Tensor& topk_weights, const Tensor& output_index,
                                       std::optional<int64_t> hidden_size) {
  const Check check("ep_gather");
  check.dim("y", y, 2, "(rows, hidden)");
  return plan_weighted_rows(check, y, "output_index", output_index, topk_ids, topk_weights, 1.0,
                            hidden_size);
}

}  // namespace dgmoe
