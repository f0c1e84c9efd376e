// The CPU kernel of the combining ops.
#pragma once

#include "../common/parallel.h"
#include "weighted_rows.h"

namespace dgmoe {

DGMOE_HD void add_biased(const RowBias& bias, int64_t offset, const uint16_t* y, float weight,
                         int64_t count, float* sums) {
  if (bias.is_float) {
    const float* b = static_cast<const float*>(bias.data) + offset;
    for (int64_t j = 0; j < count; ++j)
      sums[j] = fused_multiply_add(bf16_to_float(y[j]) + b[j], weight, sums[j]);
  } else {
    const uint16_t* b = static_cast<const uint16_t*>(bias.data) + offset;
    for (int64_t j = 0; j < count; ++j)
      sums[j] = fused_multiply_add(bf16_to_float(y[j]) + bf16_to_float(b[j]), weight, sums[j]);
  }
}

DGMOE_CPU_CLONES
static void weighted_rows(const WeightedRowsPlan& plan, int64_t begin, int64_t end) {
  constexpr int64_t kChunk = 512;  // sums that stay in the first cache while the slots pass
  float sums[kChunk];
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t column = 0; column < plan.hidden; column += kChunk) {
      const int64_t left = plan.hidden - column;
      const int64_t count = left < kChunk ? left : kChunk;
      for (int64_t j = 0; j < count; ++j) sums[j] = 0.0f;
      for (int64_t i = 0; i < plan.top_k; ++i) {
        const int64_t row = plan.row(t, i);
        if (row < 0) continue;
        const float weight = plan.weights(t, i);
        const uint16_t* y = plan.y + row * plan.y_row_stride + column;
        const int64_t bias = plan.bias.offset(t, i);
        if (bias >= 0) {
          add_biased(plan.bias, bias + column, y, weight, count, sums);
          continue;
        }
        for (int64_t j = 0; j < count; ++j)
          sums[j] = fused_multiply_add(bf16_to_float(y[j]), weight, sums[j]);
      }
      uint16_t* out = plan.out + t * plan.hidden + column;
      for (int64_t j = 0; j < count; ++j) out[j] = float_to_bf16(sums[j] * plan.factor);
    }
  }
}

inline void weighted_rows_cpu(const WeightedRowsPlan& plan) {
  parallel_items(plan.tokens, plan.hidden * (plan.top_k + 1),
                 [&](int64_t begin, int64_t end) { weighted_rows(plan, begin, end); });
}

}  // namespace dgmoe
