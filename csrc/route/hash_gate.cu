#include "hash_gate.h"

#include "../common/sanity.cuh"
#include "gate.cuh"

namespace dgmoe {
namespace {

constexpr int kThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kThreads) hash_gate_kernel(HashGatePlan plan) {
  const GatePlan& gate = plan.gate;
  const int lane = threadIdx.x % kLanes;
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (token >= gate.tokens) return;
  if (token >= real_tokens(gate)) {
    pad_row(gate, token, lane);
    return;
  }
  const LogitRow<T> row(gate, token);
  RowStats stats;
  if (gate.scoring == Scoring::kSoftmax) stats = softmax_stats(row, gate.experts, lane);
  const int64_t token_id = plan.token_ids(token, 0);
  const bool known = plan.knows_token(token_id);
  // Nothing outside the table or the logits is read, whatever the ids are.
  finish_row(gate, token, row, stats, lane, [&](int64_t j) -> int32_t {
    const int64_t expert = known ? plan.table(token_id, j) : -1;
    return plan.knows_expert(expert) ? static_cast<int32_t>(expert) : -1;
  });
}

// Finds the first slot that names nothing: token * (top_k + 1), plus 1 + j where it is the table's
// entry j.
__global__ void __launch_bounds__(kThreads)
    first_unknown_kernel(HashGatePlan plan, unsigned long long* first) {
  const GatePlan& gate = plan.gate;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (token >= gate.tokens || token >= real_tokens(gate)) return;
  const int64_t token_id = plan.token_ids(token, 0);
  int64_t slot = 0;
  if (plan.knows_token(token_id)) {
    while (slot < gate.top_k && plan.knows_expert(plan.table(token_id, slot))) ++slot;
    if (slot++ == gate.top_k) return;
  }
  atomicMin(first, static_cast<unsigned long long>(token * (gate.top_k + 1) + slot));
}

// Refuses ids that name nothing. Waits for the device.
void check_ids(const CudaScope& scope, const HashGatePlan& plan, const Tensor& like) {
  FirstFound first(scope, like);
  const unsigned grid = static_cast<unsigned>(ceil_div(plan.gate.tokens, kThreads));
  DGMOE_LAUNCH(first_unknown_kernel, grid, kThreads, 0, scope, plan, first.cell());
  const int64_t found = first.wait();
  if (found < 0) return;
  const int64_t slots = plan.gate.top_k + 1;
  const int64_t token = found / slots;
  const int64_t token_id = fetch(scope, plan.token_ids, token, 0);
  if (found % slots == 0) refuse_token(plan, token, token_id);
  const int64_t column = found % slots - 1;
  refuse_expert(plan, token_id, column, fetch(scope, plan.table, token_id, column));
}

std::tuple<Tensor, Tensor, Tensor> hash_gate_cuda(
    const Tensor& token_ids, const Tensor& table, const Tensor& logits, int64_t scoring,
    bool renormalize, double routed_scaling_factor, bool scale_on_output,
    const std::optional<Tensor>& num_tokens, int64_t num_fused_shared,
    const std::optional<Tensor>& expert_map, int64_t num_counts) {
  const CudaScope scope(token_ids);
  HashGateCall call =
      plan_hash_gate(token_ids, table, logits, scoring, renormalize, routed_scaling_factor,
                     scale_on_output, num_tokens, num_fused_shared, expert_map, num_counts);
  const GatePlan& gate = call.plan.gate;
  if (sanity_check() && !scope.is_capturing()) check_ids(scope, call.plan, token_ids);
  clear_counts(scope, gate);
  const unsigned grid = static_cast<unsigned>(ceil_div(gate.tokens, kThreads / kLanes));
  with_logit_type(gate, [&](auto type) {
    DGMOE_LAUNCH(hash_gate_kernel<decltype(type)>, grid, kThreads, 0, scope, call.plan);
  });
  return {call.gate.weights, call.gate.ids, call.gate.counts};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) { m.impl("hash_gate", DGMOE_BOX(dgmoe::hash_gate_cuda)); }
