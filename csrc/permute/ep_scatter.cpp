#include "ep_scatter.h"

#include <cstring>

#include "../common/contract.h"
#include "../common/parallel.h"
#include "rank_rows.h"

namespace dgmoe {
namespace {

// Where each expert's segment starts, and from that the final rows of the slots.
void place_segments(const EpScatterPlan& plan) {
  int64_t start = 0;
  for (int64_t e = 0; e < plan.num_local_experts; ++e) {
    plan.offsets[e] = static_cast<int32_t>(start);
    start += round_up(plan.counts[e], plan.alignment);
  }
  for (int64_t token = 0; token < plan.tokens; ++token) {
    for (int64_t slot = 0; slot < plan.top_k; ++slot) {
      int32_t& row = plan.src2dst[token * plan.top_k + slot];
      if (row < 0) continue;
      row += plan.offsets[plan.ids.local_expert(token, slot, plan.expert_start,
                                                plan.num_local_experts)];
    }
  }
  for (int64_t row = start; row < plan.all_rows; ++row) plan.m_indices[row] = -1;
}

void finish_segment(const EpScatterPlan& plan, int64_t expert) {
  const int64_t begin = plan.offsets[expert];
  const int64_t valid = begin + plan.counts[expert];
  const int64_t end = begin + round_up(plan.counts[expert], plan.alignment);
  for (int64_t row = begin; row < valid; ++row) plan.m_indices[row] = static_cast<int32_t>(expert);
  for (int64_t row = valid; row < end; ++row) plan.m_indices[row] = -1;
  store_unit_scales(plan.scale, plan.strides, 0, valid, end);
}

void copy_token(const EpScatterPlan& plan, int64_t token) {
  const uint8_t* x = static_cast<const uint8_t*>(plan.x) + token * plan.x_row_bytes;
  for (int64_t slot = 0; slot < plan.top_k; ++slot) {
    const int64_t dst = plan.src2dst[token * plan.top_k + slot];
    if (dst < 0) continue;
    std::memcpy(static_cast<uint8_t*>(plan.rows) + dst * plan.row_bytes, x,
                static_cast<size_t>(plan.row_bytes));
    for (int64_t column = 0; column < plan.strides.columns(); ++column) {
      static_cast<uint32_t*>(plan.scale)[plan.strides.at(0, dst, column)] =
          static_cast<const uint32_t*>(plan.x_scale)[plan.x_strides.at(0, token, column)];
    }
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ep_scatter_cpu(
    const Tensor& x, std::optional<Tensor> x_scale, const Tensor& topk_ids,
    int64_t num_local_experts, int64_t expert_start, int64_t scale_layout, int64_t alignment) {
  EpScatterCall call = plan_ep_scatter(x, x_scale, topk_ids, num_local_experts, expert_start,
                                       scale_layout, alignment);
  const EpScatterPlan& plan = call.plan;
  // m_max 0 leaves the bare ranks in src2dst.
  rank_rows("ep_scatter",
            DispatchIndexPlan{plan.ids, plan.tokens, plan.top_k, plan.num_local_experts, 0,
                              plan.expert_start, plan.counts, plan.src2dst});
  place_segments(plan);
  const int64_t padding = plan.alignment * (plan.strides.columns() + 1);
  parallel_items(plan.num_local_experts, padding, [&](int64_t begin, int64_t end) {
    for (int64_t expert = begin; expert < end; ++expert) finish_segment(plan, expert);
  });
  parallel_items(plan.tokens, plan.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) copy_token(plan, token);
  });
  return {call.rows, call.scale, call.m_indices, call.src2dst};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kEpScatterSchema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) { m.impl("ep_scatter", DGMOE_BOX(dgmoe::ep_scatter_cpu)); }
DGMOE_CONTRACT(ep_scatter, kEpScatterSchema)
