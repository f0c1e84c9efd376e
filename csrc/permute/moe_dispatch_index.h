// moe_dispatch_index: where each (token, slot) goes in a masked slab; the rows of each expert.
//   topk_ids           [tokens, top_k] int32 or int64, any strides
//   num_local_experts  E
//   m_max              slab rows an expert, at least tokens
//   expert_start       global id of local expert 0; ids outside [start, start + E) are elsewhere
//   ->                 masked_m [E] int32 true row counts,
//                      src2dst [tokens, top_k] int32 slab row e * m_max + j, or -1
// Row j of an expert follows token order. A token that names an expert twice has one row, shared by
// both slots, so that m_max >= tokens always suffices.
#pragma once

#include "../common/allocate.h"

namespace dgmoe {

constexpr char kMoeDispatchIndexSchema[] =
    "moe_dispatch_index(Tensor topk_ids, SymInt num_local_experts, SymInt m_max, SymInt"
    " expert_start=0) -> (Tensor, Tensor)";

struct DispatchIndexPlan {
  IdMatrix ids;
  int64_t tokens, top_k, num_local_experts, m_max, expert_start;
  int32_t* masked_m;
  int32_t* src2dst;
};

struct MoeDispatchIndexCall {
  Tensor masked_m, src2dst;
  DispatchIndexPlan plan;
};

// Shared with the ops of this room that place rows themselves.
inline MoeDispatchIndexCall plan_dispatch_index(const Check& check, const Tensor& topk_ids,
                                                int64_t num_local_experts, int64_t m_max,
                                                int64_t expert_start) {
  check.count("num_local_experts", num_local_experts);
  check.at_least("expert_start", expert_start, 0);
  const int64_t tokens = topk_ids.size(0);
  check.at_least("m_max", m_max, tokens);
  check.count("m_max", m_max);
  // Divided, since the product of two large arguments would wrap.
  check.that(num_local_experts == 0 || m_max <= INT32_MAX / num_local_experts, "m_max",
             "keep num_local_experts * m_max below 2^31", m_max);
  Tensor masked_m = empty(check.op(), "masked_m", {num_local_experts}, ScalarType::Int, topk_ids);
  Tensor src2dst =
      empty(check.op(), "src2dst", {tokens, topk_ids.size(1)}, ScalarType::Int, topk_ids);
  DispatchIndexPlan plan{id_matrix(topk_ids),
                         tokens,
                         topk_ids.size(1),
                         num_local_experts,
                         m_max,
                         expert_start,
                         static_cast<int32_t*>(mutable_data_of(masked_m)),
                         static_cast<int32_t*>(mutable_data_of(src2dst))};
  return {masked_m, src2dst, plan};
}

inline MoeDispatchIndexCall plan_moe_dispatch_index(const Tensor& topk_ids,
                                                    int64_t num_local_experts, int64_t m_max,
                                                    int64_t expert_start) {
  const Check check("moe_dispatch_index");
  check.expert_ids("topk_ids", topk_ids, "topk_ids", topk_ids);
  return plan_dispatch_index(check, topk_ids, num_local_experts, m_max, expert_start);
}

}  // namespace dgmoe
