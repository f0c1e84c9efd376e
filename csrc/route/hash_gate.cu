#include "hash_gate.h"

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
  const bool known = token_id >= 0 && token_id < plan.vocabulary;
  // Nothing outside the table or the logits is read, whatever the ids are.
  finish_row(gate, token, row, stats, lane, [&](int64_t j) -> int32_t {
    const int64_t expert = known ? plan.table(token_id, j) : -1;
    return expert >= 0 && expert < gate.experts ? static_cast<int32_t>(expert) : -1;
  });
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
