// The CPU kernel of both quantised gated activations.
#pragma once

#include "gated_cpu.h"

namespace dgmoe {

DGMOE_HD void gated_quant_chunk(const GatedQuantPlan& plan, int64_t batch, int64_t row,
                                int64_t column, int64_t count, const uint16_t* gate,
                                const uint16_t* up, uint8_t* __restrict__ q) {
  float y[kGatedChunk];
  gated_chunk(gate + column, up + column, count, y);
  if (plan.round_activation) {
    for (int64_t i = 0; i < count; ++i) y[i] = bf16_to_float(float_to_bf16(y[i]));
  }
  for (int64_t first = 0; first < count; first += plan.group_size) {
    const int64_t last = first + plan.group_size < count ? first + plan.group_size : count;
    uint32_t amax_bits = 0;
    for (int64_t i = first; i < last; ++i) {
      const uint32_t magnitude = float_bits(y[i]) & 0x7fffffffu;
      amax_bits = magnitude > amax_bits ? magnitude : amax_bits;
    }
    const GroupScale scale = group_scale(amax_bits, plan.power_of_two);
    store_scale(plan.scale, plan.layout, batch, row, (column + first) / plan.group_size, scale);
    for (int64_t i = first; i < last; ++i) y[i] *= scale.multiplier;
  }
  for (int64_t i = 0; i < count; ++i) q[column + i] = float_to_e4m3(y[i]);
}

DGMOE_CPU_CLONES
static void gated_quant_rows(const GatedQuantPlan& plan, int64_t batch, int64_t begin,
                             int64_t end) {
  const GatedPlan& in = plan.in;
  for (int64_t row = begin; row < end; ++row) {
    if (!in.valid(batch, row)) {
      if (!in.in_tile(batch, row)) continue;
      for (int64_t column = 0; column < plan.layout.columns(); ++column) {
        store_unit_scale(plan.scale, plan.layout, batch, row, column);
      }
      continue;
    }
    const uint16_t* gate = in.gate_up + batch * in.batch_stride + row * in.row_stride;
    const uint16_t* up = gate + in.inter;
    uint8_t* q = plan.q + (batch * in.rows + row) * in.inter;
    int64_t column = 0;
    // The compiler unrolls what has a constant length.
    for (; column + kGatedChunk <= in.inter; column += kGatedChunk) {
      gated_quant_chunk(plan, batch, row, column, kGatedChunk, gate, up, q);
    }
    if (column < in.inter)
      gated_quant_chunk(plan, batch, row, column, in.inter - column, gate, up, q);
  }
}

inline void gated_quant_cpu(const GatedQuantPlan& plan) {
  for_gated_rows(plan.in, [&](int64_t batch, int64_t begin, int64_t end) {
    gated_quant_rows(plan, batch, begin, end);
  });
}

}  // namespace dgmoe
