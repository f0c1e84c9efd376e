// The CPU side of what the gates share. A row is widened once and then worked on in fp32.
#pragma once

#include <algorithm>

#include "../common/parallel.h"
#include "gate.h"

namespace dgmoe {

// The sum of 32 lanes, folded in halves.
inline float fold_lanes(float (&lanes)[kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

inline void load_row(const GatePlan& plan, int64_t token, float* row) {
  for (int64_t e = 0; e < plan.experts; ++e) row[e] = plan.logits(token, e);
}

// Static, since the resolver of the clones of an inline function would be a symbol of the library.
DGMOE_CPU_CLONES
static RowStats softmax_stats(const float* row, int64_t experts) {
  uint32_t most = 0;
  for (int64_t e = 0; e < experts; ++e) most = std::max(most, ordered_key(row[e]));
  RowStats stats;
  stats.max = key_value(most);
  float lanes[kLanes] = {};
  for (int64_t first = 0; first < experts; first += kLanes) {
    const int64_t some = std::min<int64_t>(experts - first, kLanes);
    for (int64_t lane = 0; lane < some; ++lane)
      lanes[lane] += exp_f32(row[first + lane] - stats.max);
  }
  stats.sum = fold_lanes(lanes);
  return stats;
}

inline void pad_row(const GatePlan& plan, int64_t token) {
  const int64_t width = plan.width();
  std::fill_n(plan.weights + token * width, width, 0.0f);
  std::fill_n(plan.ids + token * width, width, -1);
}

// Turns the chosen experts, given in the row of ids, into weights and physical ids.
inline void finish_row(const GatePlan& plan, int64_t token, const float* row,
                       const RowStats& stats) {
  const int64_t width = plan.width();
  float* weights = plan.weights + token * width;
  int32_t* ids = plan.ids + token * width;
  float lanes[kLanes] = {};
  for (int64_t j = 0; j < plan.top_k; ++j) {
    weights[j] = score_of(plan.scoring, row[ids[j]], stats);
    lanes[j % kLanes] += weights[j];
  }
  const float sum = fold_lanes(lanes);
  for (int64_t j = 0; j < width; ++j) {
    const bool routed = j < plan.top_k;
    weights[j] = routed ? final_weight(plan, weights[j], sum) : plan.shared_weight;
    ids[j] = physical_expert(plan, token, routed ? ids[j] : plan.experts + j - plan.top_k);
  }
}

inline void count_ids(const GatePlan& plan) {
  if (plan.num_counts == 0) return;
  std::fill_n(plan.counts, plan.num_counts, 0);
  for (int64_t i = 0; i < plan.tokens * plan.width(); ++i) {
    if (plan.ids[i] >= 0 && plan.ids[i] < plan.num_counts) ++plan.counts[plan.ids[i]];
  }
}

}  // namespace dgmoe
