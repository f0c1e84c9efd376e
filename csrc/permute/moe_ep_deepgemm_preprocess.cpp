#include "moe_ep_deepgemm_preprocess.h"

#include "../common/contract.h"
#include "group_quant.h"
#include "rank_rows.h"

namespace dgmoe {
namespace {

void write_first_row(const PreprocessPlan& plan, int64_t token, int64_t dst) {
  const uint16_t* x = plan.hidden + token * plan.row_stride;
  if (plan.group_size == 0) {
    uint16_t* row = static_cast<uint16_t*>(plan.rows) + dst * plan.padded_k;
    std::memcpy(row, x, static_cast<size_t>(plan.k) * 2);
    std::memset(row + plan.k, 0, static_cast<size_t>(plan.padded_k - plan.k) * 2);
    return;
  }
  const QuantRow in{x, true, plan.k, plan.padded_k, plan.group_size, plan.power_of_two};
  quantize_row(in, static_cast<uint8_t*>(plan.rows) + dst * plan.padded_k, plan.scale, plan.strides,
               dst / plan.index.m_max, dst % plan.index.m_max);
}

// Quantises a token once, into the row of its first local slot, and copies that to its other rows.
void place_token(const PreprocessPlan& plan, int64_t token) {
  const int64_t m_max = plan.index.m_max;
  const int64_t row_bytes = plan.padded_k * (plan.group_size == 0 ? 2 : 1);
  uint8_t* rows = static_cast<uint8_t*>(plan.rows);
  const int32_t* slots = plan.index.src2dst + token * plan.index.top_k;
  int64_t first = -1;
  for (int64_t slot = 0; slot < plan.index.top_k; ++slot) {
    const int64_t dst = slots[slot];
    if (dst < 0 || dst == first) continue;
    if (first < 0) {
      first = dst;
      write_first_row(plan, token, dst);
      continue;
    }
    std::memcpy(rows + dst * row_bytes, rows + first * row_bytes, static_cast<size_t>(row_bytes));
    copy_scale_row(plan.scale, plan.strides, first / m_max, first % m_max, dst / m_max,
                   dst % m_max);
  }
}

void pad_scales(const PreprocessPlan& plan, int64_t expert) {
  const int64_t valid = plan.index.masked_m[expert];
  const int64_t tile_end = round_up(valid, kTileRows);
  const int64_t end = tile_end < plan.index.m_max ? tile_end : plan.index.m_max;
  store_unit_scales(plan.scale, plan.strides, expert, valid, end);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_ep_deepgemm_preprocess_cpu(
    const Tensor& hidden_states, const Tensor& topk_ids, int64_t num_local_experts,
    int64_t expert_start, int64_t group_size, int64_t scale_layout, bool round_scale,
    std::optional<int64_t> padded_k, std::optional<int64_t> m_max) {
  MoeEpDeepgemmPreprocessCall call =
      plan_moe_ep_deepgemm_preprocess(hidden_states, topk_ids, num_local_experts, expert_start,
                                      group_size, scale_layout, round_scale, padded_k, m_max);
  const PreprocessPlan& plan = call.plan;
  rank_rows("moe_ep_deepgemm_preprocess", plan.index);
  parallel_items(plan.index.tokens, plan.padded_k, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) place_token(plan, token);
  });
  const int64_t scales = plan.strides.columns() * kTileRows;
  parallel_items(plan.index.num_local_experts, scales, [&](int64_t begin, int64_t end) {
    for (int64_t expert = begin; expert < end; ++expert) pad_scales(plan, expert);
  });
  return {call.rows, call.scale, call.masked_m, call.src2dst};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kMoeEpDeepgemmPreprocessSchema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("moe_ep_deepgemm_preprocess", DGMOE_BOX(dgmoe::moe_ep_deepgemm_preprocess_cpu));
}
DGMOE_CONTRACT(moe_ep_deepgemm_preprocess, kMoeEpDeepgemmPreprocessSchema)
