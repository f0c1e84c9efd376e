#include "topk_gate.h"

#include <functional>
#include <vector>
#include "../common/contract.h"

#include "gate_cpu.h"

namespace dgmoe {
namespace {

DGMOE_CPU_CLONES
void choice_keys(const TopkGatePlan& plan, const float* row, const RowStats& stats,
                 uint32_t* keys) {
  for (int64_t e = 0; e < plan.gate.experts; ++e) keys[e] = plan.choice_key(row[e], e, stats);
}

// Sets the keys of the experts of all but the best groups to 0.
void drop_groups(const TopkGatePlan& plan, const float* row, const RowStats& stats, uint32_t* keys,
                 std::vector<uint64_t>& groups) {
  groups.resize(plan.num_groups);
  for (int64_t g = 0; g < plan.num_groups; ++g) {
    uint32_t first = 0;
    uint32_t second = 0;
    for (int64_t e = g * plan.group_size; e < (g + 1) * plan.group_size; ++e) {
      const uint32_t key = plan.group_member_key(row[e], e, stats);
      second = std::max(second, std::min(first, key));
      first = std::max(first, key);
    }
    groups[g] = ranked(plan.group_key(first, second), static_cast<uint32_t>(g));
  }
  std::nth_element(groups.begin(), groups.begin() + plan.topk_groups - 1, groups.end(),
                   std::greater<>());
  for (int64_t i = plan.topk_groups; i < plan.num_groups; ++i) {
    std::fill_n(keys + ranked_index(groups[i]) * plan.group_size, plan.group_size, 0u);
  }
}

void gate_rows(const TopkGatePlan& plan, int64_t real, int64_t begin, int64_t end) {
  const GatePlan& gate = plan.gate;
  std::vector<float> row(gate.experts);
  std::vector<uint32_t> keys(gate.experts);
  std::vector<uint64_t> ranks(gate.experts);
  std::vector<uint64_t> groups;
  for (int64_t token = begin; token < end; ++token) {
    if (token >= real) {
      pad_row(gate, token);
      continue;
    }
    load_row(gate, token, row.data());
    const RowStats stats =
        plan.needs_stats() ? softmax_stats(row.data(), gate.experts) : RowStats{};
    choice_keys(plan, row.data(), stats, keys.data());
    if (plan.topk_groups < plan.num_groups) {
      drop_groups(plan, row.data(), stats, keys.data(), groups);
    }
    for (int64_t e = 0; e < gate.experts; ++e) ranks[e] = ranked(keys[e], static_cast<uint32_t>(e));
    std::partial_sort(ranks.begin(), ranks.begin() + gate.top_k, ranks.end(), std::greater<>());
    int32_t* ids = gate.ids + token * gate.width();
    for (int64_t j = 0; j < gate.top_k; ++j) ids[j] = static_cast<int32_t>(ranked_index(ranks[j]));
    finish_row(gate, token, row.data(), stats);
  }
}

std::tuple<Tensor, Tensor, Tensor> topk_gate_cpu(
    const Tensor& logits, int64_t top_k, int64_t scoring, const std::optional<Tensor>& bias,
    int64_t num_groups, int64_t topk_groups, int64_t group_scores, bool renormalize,
    double routed_scaling_factor, bool scale_on_output, const std::optional<Tensor>& num_tokens,
    int64_t num_fused_shared, const std::optional<Tensor>& expert_map, int64_t num_counts) {
  TopkGateCall call = plan_topk_gate(
      logits, top_k, scoring, bias, num_groups, topk_groups, group_scores, renormalize,
      routed_scaling_factor, scale_on_output, num_tokens, num_fused_shared, expert_map, num_counts);
  const GatePlan& gate = call.plan.gate;
  const int64_t real = real_tokens(gate);
  // A score costs about as much as sixteen copied elements.
  parallel_items(gate.tokens, gate.experts * 16,
                 [&](int64_t begin, int64_t end) { gate_rows(call.plan, real, begin, end); });
  count_ids(gate);
  return {call.gate.weights, call.gate.ids, call.gate.counts};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kTopkGateSchema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) { m.impl("topk_gate", DGMOE_BOX(dgmoe::topk_gate_cpu)); }
DGMOE_CONTRACT(topk_gate, kTopkGateSchema)
