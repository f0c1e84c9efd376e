// hash_gate: the experts that a table names for each token's id, weighed by their logits.
//   token_ids  [tokens] int32 or int64, any stride
//   table      [vocabulary, top_k] int32 or int64 expert ids, any strides
//   logits     [tokens, experts] float32, bfloat16 or float16, any strides
//   scoring, renormalize, routed_scaling_factor, scale_on_output, num_tokens, num_fused_shared,
//   expert_map, num_counts and the results as in topk_gate; columns are in the table's order
// A token id outside the table or an expert id outside the logits is refused on CPU, and on CUDA
// where DGMOE_SANITY_CHECK is 1 and no graph is captured; otherwise its slots get id -1 and weight
// 0. Rows from num_tokens on are not looked at.
#pragma once

#include "gate.h"

namespace dgmoe {

constexpr char kHashGateSchema[] =
    "hash_gate(Tensor token_ids, Tensor table, Tensor logits, *, int scoring=2,"
    " bool renormalize=True, float routed_scaling_factor=1.0, bool scale_on_output=False,"
    " Tensor? num_tokens=None, SymInt num_fused_shared=0, Tensor? expert_map=None,"
    " SymInt num_counts=0) -> (Tensor, Tensor, Tensor)";

struct HashGatePlan {
  GatePlan gate;
  IdMatrix token_ids;
  IdMatrix table;
  int64_t vocabulary;

  DGMOE_HD bool knows_token(int64_t id) const { return id >= 0 && id < vocabulary; }
  DGMOE_HD bool knows_expert(int64_t id) const { return id >= 0 && id < gate.experts; }
};

// What a row or a table entry names nothing by.
inline void refuse_token(const HashGatePlan& plan, int64_t row, int64_t got) {
  Check("hash_gate")
      .that(false, "token_ids", "be rows of the table, 0 to " + std::to_string(plan.vocabulary - 1),
            std::to_string(got) + " at [" + std::to_string(row) + "]");
}
inline void refuse_expert(const HashGatePlan& plan, int64_t row, int64_t column, int64_t got) {
  Check("hash_gate")
      .that(false, "table", "hold expert ids, 0 to " + std::to_string(plan.gate.experts - 1),
            std::to_string(got) + " at [" + std::to_string(row) + ", " + std::to_string(column) +
                "]");
}

struct HashGateCall {
  GateCall gate;
  HashGatePlan plan;
};

inline HashGateCall plan_hash_gate(const Tensor& token_ids, const Tensor& table,
                                   const Tensor& logits, int64_t scoring, bool renormalize,
                                   double routed_scaling_factor, bool scale_on_output,
                                   const std::optional<Tensor>& num_tokens,
                                   int64_t num_fused_shared,
                                   const std::optional<Tensor>& expert_map, int64_t num_counts) {
  const Check check("hash_gate");
  check.dtype("token_ids", token_ids, {ScalarType::Int, ScalarType::Long});
  check.dim("token_ids", token_ids, 1, "(tokens,)");
  check.dtype("table", table, {ScalarType::Int, ScalarType::Long});
  check.dim("table", table, 2, "(vocabulary, top_k)");
  check.that(table.size(1) <= kMostExperts, "table", "have at most 65536 columns",
             shape_text(table));
  const GateArguments args{table.size(1),         scoring,         renormalize,
                           routed_scaling_factor, scale_on_output, num_tokens,
                           num_fused_shared,      expert_map,      num_counts};
  check.same_device("table", table, "token_ids", token_ids);
  check.same_device("logits", logits, "token_ids", token_ids);
  check_gate(check, logits, args);
  check.size("token_ids", token_ids, 0, logits.size(0), "rows of logits");
  GateCall call = plan_gate(check.op(), logits, args);
  const IdMatrix ids{data_of(token_ids), dtype_of(token_ids) == ScalarType::Long,
                     token_ids.stride(0), 0};
  return {call, {call.plan, ids, id_matrix(table), table.size(0)}};
}

}  // namespace dgmoe
