#include "topk_gate.h"

#include "gate.cuh"
#include "topk_gate_warp.cuh"

namespace dgmoe {
namespace {

constexpr int64_t kCachedExperts = 8192;  // keys of a block's token that stay in shared memory

// The highest rank up to `bound` among `count` indices, 0 where there is none; by the whole block.
template <typename Key>
__device__ uint64_t highest_up_to(uint64_t bound, int64_t count, const Key& key_of) {
  __shared__ uint64_t of_warps[kLanes];
  const int lane = threadIdx.x % kLanes;
  uint64_t best = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    const uint64_t rank = ranked(key_of(i), static_cast<uint32_t>(i));
    if (rank <= bound && rank > best) best = rank;
  }
  const auto across = [](uint64_t rank) {
    const uint32_t high = warp_max(static_cast<uint32_t>(rank >> 32));
    const bool leads = static_cast<uint32_t>(rank >> 32) == high;
    return static_cast<uint64_t>(high) << 32 | warp_max(leads ? static_cast<uint32_t>(rank) : 0);
  };
  best = across(best);
  __syncthreads();  // the last call's readers are done
  if (lane == 0) of_warps[threadIdx.x / kLanes] = best;
  __syncthreads();
  return across(lane < blockDim.x / kLanes ? of_warps[lane] : 0);
}

// A token a block: any number of experts, chosen in falling order without marking what is taken.
template <typename T>
__global__ void __launch_bounds__(1024)
    topk_gate_block_kernel(TopkGatePlan plan, uint32_t* all_groups, bool cached) {
  extern __shared__ uint32_t cache[];  // [experts] keys, where `cached`
  __shared__ RowStats shared_stats;
  const GatePlan& gate = plan.gate;
  const int lane = threadIdx.x % kLanes;
  const int64_t token = blockIdx.x;
  const bool first_warp = threadIdx.x < kLanes;
  if (token >= real_tokens(gate)) {
    if (first_warp) pad_row(gate, token, lane);
    return;
  }
  const LogitRow<T> row(gate, token);
  if (plan.needs_stats() && first_warp) {
    const RowStats found = softmax_stats(row, gate.experts, lane);
    if (lane == 0) shared_stats = found;
  }
  __syncthreads();
  const RowStats stats = plan.needs_stats() ? shared_stats : RowStats{};

  const bool grouped = plan.topk_groups < plan.num_groups;
  uint32_t* groups = all_groups + token * plan.num_groups;
  uint64_t last_group = 0;  // the rank of the last group that stays
  if (grouped) {
    for (int64_t g = threadIdx.x / kLanes; g < plan.num_groups; g += blockDim.x / kLanes) {
      const uint32_t best = group_key(
          plan, g, lane, [&](int64_t e) { return plan.group_member_key(row[e], e, stats); });
      if (lane == 0) groups[g] = best;
    }
    __syncthreads();
    uint64_t bound = ~uint64_t{0};  // the rank of a NaN in group 0 is as high
    for (int64_t i = 0; i < plan.topk_groups; ++i) {
      last_group = highest_up_to(bound, plan.num_groups, [&](int64_t g) { return groups[g]; });
      bound = last_group - 1;
    }
  }
  const auto key_of = [&](int64_t e) {
    if (grouped) {
      const int64_t g = e / plan.group_size;
      if (ranked(groups[g], static_cast<uint32_t>(g)) < last_group) return uint32_t{0};
    }
    return plan.choice_key(row[e], e, stats);
  };
  if (cached) {
    for (int64_t e = threadIdx.x; e < gate.experts; e += blockDim.x) cache[e] = key_of(e);
    __syncthreads();
  }
  int32_t* ids = gate.ids + token * gate.width();
  uint64_t bound = ~uint64_t{0};
  for (int64_t j = 0; j < gate.top_k; ++j) {
    const uint64_t rank = highest_up_to(bound, gate.experts,
                                        [&](int64_t e) { return cached ? cache[e] : key_of(e); });
    if (threadIdx.x == 0) ids[j] = static_cast<int32_t>(ranked_index(rank));
    bound = rank - 1;
  }
  __syncthreads();
  if (first_warp) {
    finish_row(gate, token, row, stats, lane, [&](int64_t j) { return ids[j]; });
  }
}

template <Scoring kScoring>
void launch_warps(const CudaScope& scope, const TopkGatePlan& plan) {
  const GatePlan& gate = plan.gate;
  const unsigned grid = static_cast<unsigned>(ceil_div(gate.tokens, kWarps));
  const unsigned shared = static_cast<unsigned>(kWarps * room_words(plan) * sizeof(uint32_t));
  const auto kernel = gate.experts <= 128   ? topk_gate_warp_kernel<4, kScoring>
                      : gate.experts <= 256 ? topk_gate_warp_kernel<8, kScoring>
                                            : topk_gate_warp_kernel<16, kScoring>;
  const int reciprocal = static_cast<int>(ceil_div(1 << kQuotientShift, plan.group_size));
  DGMOE_LAUNCH(kernel, grid, kWarpThreads, shared, scope, plan, reciprocal);
}

void launch_warps(const CudaScope& scope, const TopkGatePlan& plan) {
  switch (plan.gate.scoring) {
    case Scoring::kSoftmax:
      return launch_warps<Scoring::kSoftmax>(scope, plan);
    case Scoring::kSigmoid:
      return launch_warps<Scoring::kSigmoid>(scope, plan);
    case Scoring::kSqrtSoftplus:
      return launch_warps<Scoring::kSqrtSoftplus>(scope, plan);
    default:
      return launch_warps<Scoring::kIdentity>(scope, plan);
  }
}

template <typename T>
void launch_blocks(const CudaScope& scope, const TopkGatePlan& plan, const Tensor& like) {
  const GatePlan& gate = plan.gate;
  const bool grouped = plan.topk_groups < plan.num_groups;
  // Goes back to the caching allocator at return; its next user waits in the same stream.
  Tensor groups = empty("topk_gate", "group scores", {grouped ? gate.tokens : 0, plan.num_groups},
                        ScalarType::Int, like);
  const bool cached = gate.experts <= kCachedExperts;
  const unsigned threads = gate.experts <= 1024 ? 256 : 1024;
  const unsigned shared = static_cast<unsigned>(cached ? gate.experts * sizeof(uint32_t) : 0);
  DGMOE_LAUNCH(topk_gate_block_kernel<T>, static_cast<unsigned>(gate.tokens), threads, shared,
               scope, plan, static_cast<uint32_t*>(mutable_data_of(groups)), cached);
}

std::tuple<Tensor, Tensor, Tensor> topk_gate_cuda(
    const Tensor& logits, int64_t top_k, int64_t scoring, const std::optional<Tensor>& bias,
    int64_t num_groups, int64_t topk_groups, int64_t group_scores, bool renormalize,
    double routed_scaling_factor, bool scale_on_output, const std::optional<Tensor>& num_tokens,
    int64_t num_fused_shared, const std::optional<Tensor>& expert_map, int64_t num_counts) {
  const CudaScope scope(logits);
  TopkGateCall call = plan_topk_gate(
      logits, top_k, scoring, bias, num_groups, topk_groups, group_scores, renormalize,
      routed_scaling_factor, scale_on_output, num_tokens, num_fused_shared, expert_map, num_counts);
  const GatePlan& gate = call.plan.gate;
  clear_counts(scope, gate);
  if (gate.experts <= kWarpExperts && gate.top_k <= kLanes) {
    launch_warps(scope, call.plan);
  } else {
    with_logit_type(gate,
                    [&](auto type) { launch_blocks<decltype(type)>(scope, call.plan, logits); });
  }
  return {call.gate.weights, call.gate.ids, call.gate.counts};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) { m.impl("topk_gate", DGMOE_BOX(dgmoe::topk_gate_cuda)); }
