#include "hash_gate.h"

#include <vector>
#include "../common/contract.h"

#include "gate_cpu.h"

namespace dgmoe {
namespace {

// Looks the experts up, and refuses what is not there before any row is worked on.
void look_up(const HashGatePlan& plan, int64_t real) {
  const GatePlan& gate = plan.gate;
  for (int64_t token = 0; token < gate.tokens && token < real; ++token) {
    const int64_t token_id = plan.token_ids(token, 0);
    if (!plan.knows_token(token_id)) refuse_token(plan, token, token_id);
    for (int64_t j = 0; j < gate.top_k; ++j) {
      const int64_t expert = plan.table(token_id, j);
      if (!plan.knows_expert(expert)) refuse_expert(plan, token_id, j, expert);
      gate.ids[token * gate.width() + j] = static_cast<int32_t>(expert);
    }
  }
}

void gate_rows(const GatePlan& gate, int64_t real, int64_t begin, int64_t end) {
  std::vector<float> row(gate.experts);
  for (int64_t token = begin; token < end; ++token) {
    if (token >= real) {
      pad_row(gate, token);
      continue;
    }
    load_row(gate, token, row.data());
    const bool softmax = gate.scoring == Scoring::kSoftmax;
    const RowStats stats = softmax ? softmax_stats(row.data(), gate.experts) : RowStats{};
    finish_row(gate, token, row.data(), stats);
  }
}

std::tuple<Tensor, Tensor, Tensor> hash_gate_cpu(
    const Tensor& token_ids, const Tensor& table, const Tensor& logits, int64_t scoring,
    bool renormalize, double routed_scaling_factor, bool scale_on_output,
    const std::optional<Tensor>& num_tokens, int64_t num_fused_shared,
    const std::optional<Tensor>& expert_map, int64_t num_counts) {
  HashGateCall call =
      plan_hash_gate(token_ids, table, logits, scoring, renormalize, routed_scaling_factor,
                     scale_on_output, num_tokens, num_fused_shared, expert_map, num_counts);
  const GatePlan& gate = call.plan.gate;
  const int64_t real = real_tokens(gate);
  look_up(call.plan, real);
  parallel_items(gate.tokens, gate.experts,
                 [&](int64_t begin, int64_t end) { gate_rows(gate, real, begin, end); });
  count_ids(gate);
  return {call.gate.weights, call.gate.ids, call.gate.counts};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kHashGateSchema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) { m.impl("hash_gate", DGMOE_BOX(dgmoe::hash_gate_cpu)); }
DGMOE_CONTRACT(hash_gate, kHashGateSchema)
