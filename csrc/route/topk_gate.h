// topk_gate: the top_k experts of each token and their weights, from router logits.
//   logits       [tokens, experts] float32, bfloat16 or float16, any strides; 1 to 65536 experts
//   scoring      0 softmax, 1 sigmoid, 2 sqrt(softplus), 3 identity, in fp32
//   bias         [experts] float32, any stride: added to the scores for the choice only
//   num_groups, topk_groups, group_scores  experts come from the topk_groups best of num_groups equal
//                groups; a group counts its best score (1) or the sum of its best two (2); 0: two
//                with a bias, else one
//   renormalize, routed_scaling_factor, scale_on_output  w /= sum + 1e-20; then w *= factor
//   num_tokens   one int32 or int64: rows from it on get ids -1 and weights 0
//   num_fused_shared  further columns: ids experts + j, weight 1 / factor, or 1 with scale_on_output
//   expert_map   [experts + shared (, replicas)] int32: a row's entries before the first negative one
//                are the replicas of that id, token t takes number t % replicas; none: id -1
//   ->           weights [tokens, top_k + shared] float32, ids [same] int32 in falling order of the
//                choice, counts [num_counts] int32: slots that name each id
// Chosen by score + bias, without a bias by the logit, of which every score is a rising function. NaN
// ranks first, +0 equals -0, ties go to the lower id: ids of a row are distinct whatever its values.
#pragma once

#include "gate.h"

namespace dgmoe {

constexpr char kTopkGateSchema[] =
    "topk_gate(Tensor logits, SymInt top_k, *, int scoring=0, Tensor? bias=None, SymInt "
    "num_groups=1,"
    " SymInt topk_groups=1, int group_scores=0, bool renormalize=True,"
    " float routed_scaling_factor=1.0, bool scale_on_output=False, Tensor? num_tokens=None,"
    " SymInt num_fused_shared=0, Tensor? expert_map=None, SymInt num_counts=0)"
    " -> (Tensor, Tensor, Tensor)";

struct TopkGatePlan {
  GatePlan gate;
  const float* bias;  // or null
  int64_t bias_stride;
  int64_t num_groups, topk_groups, group_size;
  bool top_two;  // a group's score is the sum of its best two

  // By what an expert is chosen.
  DGMOE_HD uint32_t choice_key(float logit, int64_t expert, const RowStats& stats) const {
    if (bias == nullptr) return ordered_key(logit);
    return ordered_key(score_of(gate.scoring, logit, stats) + bias[expert * bias_stride]);
  }
  // What an expert adds to its group. Sums need scores; a maximum does not.
  DGMOE_HD uint32_t group_member_key(float logit, int64_t expert, const RowStats& stats) const {
    if (bias != nullptr || !top_two) return choice_key(logit, expert, stats);
    return ordered_key(score_of(gate.scoring, logit, stats));
  }
  DGMOE_HD uint32_t group_key(uint32_t first, uint32_t second) const {
    // A group of one has no second.
    if (!top_two || second == 0) return first;
    return ordered_key(key_value(first) + key_value(second));
  }
  DGMOE_HD bool needs_stats() const { return gate.scoring == Scoring::kSoftmax; }
};

struct TopkGateCall {
  GateCall gate;
  TopkGatePlan plan;
};

inline TopkGateCall plan_topk_gate(const Tensor& logits, int64_t top_k, int64_t scoring,
                                   const std::optional<Tensor>& bias, int64_t num_groups,
                                   int64_t topk_groups, int64_t group_scores, bool renormalize,
                                   double routed_scaling_factor, bool scale_on_output,
                                   const std::optional<Tensor>& num_tokens,
                                   int64_t num_fused_shared,
                                   const std::optional<Tensor>& expert_map, int64_t num_counts) {
  const Check check("topk_gate");
  const GateArguments args{top_k,           scoring,    renormalize,      routed_scaling_factor,
                           scale_on_output, num_tokens, num_fused_shared, expert_map,
                           num_counts};
  check_gate(check, logits, args);
  const int64_t experts = logits.size(1);
  if (bias.has_value()) {
    check.dtype("bias", *bias, {ScalarType::Float});
    check.dim("bias", *bias, 1, "(experts,)");
    check.size("bias", *bias, 0, experts, "experts");
    check.same_device("bias", *bias, "logits", logits);
  }
  check.that(num_groups >= 1 && num_groups <= experts && experts % num_groups == 0, "num_groups",
             "divide the number of experts, " + std::to_string(experts), num_groups);
  check.that(topk_groups >= 1 && topk_groups <= num_groups, "topk_groups",
             "be 1 to num_groups, " + std::to_string(num_groups), topk_groups);
  check.that(group_scores >= 0 && group_scores <= 2, "group_scores",
             "be 1 (the best), 2 (the sum of the best two) or 0 (2 with a bias, else 1)",
             group_scores);
  const int64_t group_size = experts / num_groups;
  check.that(top_k >= 0 && top_k <= topk_groups * group_size, "top_k",
             "be at least 0 and at most the experts within reach, " +
                 std::to_string(topk_groups * group_size),
             top_k);
  GateCall call = plan_gate(check.op(), logits, args);
  TopkGatePlan plan{call.plan,
                    bias.has_value() ? static_cast<const float*>(data_of(*bias)) : nullptr,
                    bias.has_value() ? bias->stride(0) : 0,
                    num_groups,
                    topk_groups,
                    group_size,
                    group_scores == 2 || (group_scores == 0 && bias.has_value())};
  return {call, plan};
}

}  // namespace dgmoe
