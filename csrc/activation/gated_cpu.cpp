#include "gated_cpu.h"

namespace dgmoe {
namespace {

DGMOE_CPU_CLONES
void bf16_rows(const GatedBf16Plan& plan, int64_t batch, int64_t begin, int64_t end) {
  const GatedPlan& in = plan.in;
  for (int64_t row = begin; row < end; ++row) {
    if (!in.valid(batch, row)) continue;
    const uint16_t* from = in.gate_up + batch * in.batch_stride + row * in.row_stride;
    const int64_t bias = in.bias_row(batch, row);
    uint16_t* out = plan.out + (batch * in.rows + row) * in.inter;
    for (int64_t column = 0; column < in.inter; column += kGatedChunk) {
      const int64_t left = in.inter - column;
      const int64_t count = left < kGatedChunk ? left : kGatedChunk;
      float y[kGatedChunk];
      gated_chunk(in, from, bias, column, count, y);
      for (int64_t i = 0; i < count; ++i) out[column + i] = float_to_bf16(y[i]);
    }
  }
}

DGMOE_HD void quant_chunk(const GatedQuantPlan& plan, int64_t batch, int64_t row, int64_t bias,
                          int64_t column, int64_t count, const uint16_t* from,
                          uint8_t* __restrict__ q) {
  float y[kGatedChunk];
  gated_chunk(plan.in, from, bias, column, count, y);
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
    store_scale(plan.scale, plan.strides, batch, row, (column + first) / plan.group_size, scale);
    for (int64_t i = first; i < last; ++i) y[i] *= scale.multiplier;
  }
  for (int64_t i = 0; i < count; ++i) q[column + i] = float_to_e4m3(y[i]);
}

DGMOE_CPU_CLONES
void quant_rows(const GatedQuantPlan& plan, int64_t batch, int64_t begin, int64_t end) {
  const GatedPlan& in = plan.in;
  for (int64_t row = begin; row < end; ++row) {
    if (!in.valid(batch, row)) {
      if (!in.in_tile(batch, row)) continue;
      for (int64_t column = 0; column < plan.strides.columns(); ++column) {
        store_unit_scale(plan.scale, plan.strides, batch, row, column);
      }
      continue;
    }
    const uint16_t* from = in.gate_up + batch * in.batch_stride + row * in.row_stride;
    const int64_t bias = in.bias_row(batch, row);
    uint8_t* q = plan.q + (batch * in.rows + row) * in.inter;
    int64_t column = 0;
    // The compiler unrolls what has a constant length.
    for (; column + kGatedChunk <= in.inter; column += kGatedChunk) {
      quant_chunk(plan, batch, row, bias, column, kGatedChunk, from, q);
    }
    if (column < in.inter) {
      quant_chunk(plan, batch, row, bias, column, in.inter - column, from, q);
    }
  }
}

}  // namespace

void gated_bf16_cpu(const char* op, const GatedBf16Plan& plan) {
  for_gated_rows(op, plan.in, [&](int64_t batch, int64_t begin, int64_t end) {
    bf16_rows(plan, batch, begin, end);
  });
}

void gated_quant_cpu(const char* op, const GatedQuantPlan& plan) {
  for_gated_rows(op, plan.in, [&](int64_t batch, int64_t begin, int64_t end) {
    quant_rows(plan, batch, begin, end);
  });
}

}  // namespace dgmoe
