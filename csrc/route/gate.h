// What the gates share: scores, the order of keys, the sum of a row, and what happens to a chosen
// expert. CPU and CUDA call these, so that both give the same bits.
#pragma once

#include "../common/allocate.h"

namespace dgmoe {

enum class Scoring : int64_t { kSoftmax = 0, kSigmoid = 1, kSqrtSoftplus = 2, kIdentity = 3 };

// A row is summed by 32 lanes: lane l adds the columns l, l + 32, ... in order, then lanes fold in
// halves: l takes that of l + 16, l + 8, l + 4, l + 2, l + 1.
constexpr int kLanes = 32;
constexpr float kSumFloor = 1e-20f;  // added to the sum that divides, as the models' own code does
constexpr int64_t kMostExperts = 65536;

// What softmax needs to know of its whole row.
struct RowStats {
  float max = 0.0f;
  float sum = 1.0f;
};

struct GatePlan {
  WeightMatrix logits;
  int64_t tokens, experts, top_k, shared;
  Scoring scoring;
  bool renormalize;
  float scale;  // of routed weights
  float shared_weight;
  const void* num_tokens;  // one integer, or null
  bool num_tokens_int64;
  const int32_t* expert_map;  // [experts + shared, replicas], or null
  int64_t replicas, map_row_stride, map_column_stride;
  float* weights;   // [tokens, width]
  int32_t* ids;     // [tokens, width]
  int32_t* counts;  // [num_counts]
  int64_t num_counts;

  DGMOE_HD int64_t width() const { return top_k + shared; }
};

DGMOE_HD int64_t real_tokens(const GatePlan& plan) {
  if (plan.num_tokens == nullptr) return plan.tokens;
  return plan.num_tokens_int64 ? *static_cast<const int64_t*>(plan.num_tokens)
                               : *static_cast<const int32_t*>(plan.num_tokens);
}

// Maps floats to integers of the same order: NaN of any sign above +inf, -0 like +0. Never 0.
DGMOE_HD uint32_t ordered_key(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Selects instead of branches, so that keys are computed in parallel.
  const uint32_t flip = bits > 0x80000000u ? 0xffffffffu : 0x80000000u;
  const uint32_t key = magnitude == 0 ? 0x80000000u : bits ^ flip;
  return magnitude > kInfBits ? 0xffffffffu : key;
}

DGMOE_HD float key_value(uint32_t key) {
  if (key == 0xffffffffu) return bits_float(kNanBits);
  return bits_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// Orders by key, then by the lower index. Distinct for distinct indices.
DGMOE_HD uint64_t ranked(uint32_t key, uint32_t index) {
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~index);
}
DGMOE_HD uint32_t ranked_index(uint64_t rank) { return ~static_cast<uint32_t>(rank); }

DGMOE_HD float score_of(Scoring scoring, float logit, const RowStats& stats) {
  switch (scoring) {
    case Scoring::kSoftmax:
      return exp_f32(logit - stats.max) / stats.sum;
    case Scoring::kSigmoid:
      return sigmoid(logit);
    case Scoring::kSqrtSoftplus:
      return sqrt_softplus(logit);
    default:
      return logit;
  }
}

// A weight from its score: NaN always has the same bits.
DGMOE_HD float final_weight(const GatePlan& plan, float score, float sum) {
  const float weight = (plan.renormalize ? score / (sum + kSumFloor) : score) * plan.scale;
  return weight == weight ? weight : bits_float(kNanBits);
}

// The physical id of an expert for this token: the replicas of an expert are the entries of its
// row of the map before the first negative one, and tokens go round robin.
DGMOE_HD int32_t physical_expert(const GatePlan& plan, int64_t token, int64_t expert) {
  if (plan.expert_map == nullptr) return static_cast<int32_t>(expert);
  const int32_t* row = plan.expert_map + expert * plan.map_row_stride;
  int64_t replicas = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  while (replicas < plan.replicas && row[replicas * plan.map_column_stride] >= 0) ++replicas;
  return replicas == 0 ? -1 : row[token % replicas * plan.map_column_stride];
}

struct GateCall {
  Tensor weights, ids, counts;
  GatePlan plan;
};

struct GateArguments {
  int64_t top_k;
  int64_t scoring;
  bool renormalize;
  double routed_scaling_factor;
  bool scale_on_output;
  const std::optional<Tensor>& num_tokens;
  int64_t num_fused_shared;
  const std::optional<Tensor>& expert_map;
  int64_t num_counts;
};

// Checks what both gates take; allocates nothing.
inline void check_gate(const Check& check, const Tensor& logits, const GateArguments& args) {
  check.dtype("logits", logits, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  check.dim("logits", logits, 2, "(tokens, experts)");
  check.that(logits.size(1) >= 1 && logits.size(1) <= kMostExperts, "logits",
             "have 1 to 65536 experts", shape_text(logits));
  check.that(args.scoring >= 0 && args.scoring <= 3, "scoring",
             "be 0 (softmax), 1 (sigmoid), 2 (sqrt-softplus) or 3 (identity)", args.scoring);
  check.positive_float32("routed_scaling_factor", args.routed_scaling_factor);
  check.that(args.num_fused_shared >= 0 && args.num_fused_shared <= kMostExperts,
             "num_fused_shared", "be 0 to 65536", args.num_fused_shared);
  check.count("num_counts", args.num_counts);
  if (args.num_tokens.has_value()) {
    const Tensor& num_tokens = *args.num_tokens;
    check.dtype("num_tokens", num_tokens, {ScalarType::Int, ScalarType::Long});
    check.that(num_tokens.numel() == 1, "num_tokens", "hold one integer", shape_text(num_tokens));
    check.same_device("num_tokens", num_tokens, "logits", logits);
    check.counts("num_tokens", num_tokens, "rows of logits", logits.size(0));
  }
  if (args.expert_map.has_value()) {
    const Tensor& map = *args.expert_map;
    check.dtype("expert_map", map, {ScalarType::Int});
    check.that(map.dim() == 1 || map.dim() == 2, "expert_map",
               "have shape (experts,) or (experts, replicas)", shape_text(map));
    check.size("expert_map", map, 0, logits.size(1) + args.num_fused_shared,
               "routed and fused shared experts");
    check.same_device("expert_map", map, "logits", logits);
    if (args.num_counts > 0) check.below("expert_map", map, "ids", args.num_counts);
  }
}

inline GateCall plan_gate(const char* op, const Tensor& logits, const GateArguments& args) {
  const int64_t tokens = logits.size(0);
  const int64_t width = args.top_k + args.num_fused_shared;
  Tensor weights = empty(op, "weights", {tokens, width}, ScalarType::Float, logits);
  Tensor ids = empty(op, "ids", {tokens, width}, ScalarType::Int, logits);
  Tensor counts = empty(op, "counts", {args.num_counts}, ScalarType::Int, logits);
  const double factor = args.routed_scaling_factor;
  GatePlan plan{};
  plan.logits = weight_matrix(logits);
  plan.tokens = tokens;
  plan.experts = logits.size(1);
  plan.top_k = args.top_k;
  plan.shared = args.num_fused_shared;
  plan.scoring = static_cast<Scoring>(args.scoring);
  plan.renormalize = args.renormalize;
  plan.scale = args.scale_on_output ? static_cast<float>(factor) : 1.0f;
  plan.shared_weight = args.scale_on_output ? 1.0f : static_cast<float>(1.0 / factor);
  if (args.num_tokens.has_value()) {
    plan.num_tokens = data_of(*args.num_tokens);
    plan.num_tokens_int64 = dtype_of(*args.num_tokens) == ScalarType::Long;
  }
  if (args.expert_map.has_value()) {
    const Tensor& map = *args.expert_map;
    const bool replicated = map.dim() == 2;
    plan.replicas = replicated ? map.size(1) : 1;
    plan.map_row_stride = map.stride(0);
    plan.map_column_stride = replicated ? map.stride(1) : 1;
    plan.expert_map = static_cast<const int32_t*>(data_of(map));
  }
  plan.weights = static_cast<float*>(mutable_data_of(weights));
  plan.ids = static_cast<int32_t*>(mutable_data_of(ids));
  plan.counts = static_cast<int32_t*>(mutable_data_of(counts));
  plan.num_counts = args.num_counts;
  return {weights, ids, counts, plan};
}

}  // namespace dgmoe
