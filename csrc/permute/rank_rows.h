// What the CPU kernels of this room share to place rows: the row of a token inside each expert that
// it names, in token order, and the scales of padding rows.
#pragma once

#include "moe_dispatch_index.h"

namespace dgmoe {

// Fills masked_m with the rows of each expert and src2dst with e * m_max + rank, or -1.
inline void rank_rows(const char* op, const DispatchIndexPlan& plan) {
  const int64_t experts = plan.num_local_experts;
  auto last_token = host_workspace<int64_t>(op, "last tokens", experts, -1);
  for (int64_t e = 0; e < experts; ++e) plan.masked_m[e] = 0;
  for (int64_t token = 0; token < plan.tokens; ++token) {
    for (int64_t slot = 0; slot < plan.top_k; ++slot) {
      const int64_t e = plan.ids.local_expert(token, slot, plan.expert_start, experts);
      int32_t& row = plan.src2dst[token * plan.top_k + slot];
      if (e < 0) {
        row = -1;
        continue;
      }
      // A second slot of the same token shares the row that the first one took.
      if (last_token[e] != token) ++plan.masked_m[e];
      last_token[e] = token;
      row = static_cast<int32_t>(e * plan.m_max + plan.masked_m[e] - 1);
    }
  }
}

// Gives the padding rows [begin, end) scale 1.
inline void store_unit_scales(void* scale, const ScaleStrides& strides, int64_t batch,
                              int64_t begin, int64_t end) {
  for (int64_t column = 0; column < strides.columns(); ++column) {
    for (int64_t row = begin; row < end; ++row) {
      store_unit_scale(scale, strides, batch, row, column);
    }
  }
}

}  // namespace dgmoe
