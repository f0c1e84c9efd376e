#include "quant_block_fp8.h"

#include <algorithm>

#include "../common/contract.h"
#include "../common/parallel.h"

namespace dgmoe {
namespace {

// Where in the weights a block row of one expert lies: `n` rows from `n0` on.
struct BlockRow {
  int64_t batch, n0, n;
};

DGMOE_HD void widen(const QuantBlockFp8Plan& plan, int64_t offset, int64_t count, float* x) {
  if (plan.is_bf16) {
    const uint16_t* in = static_cast<const uint16_t*>(plan.weight) + offset;
    for (int64_t i = 0; i < count; ++i) x[i] = bf16_to_float(in[i]);
  } else {
    const float* in = static_cast<const float*>(plan.weight) + offset;
    for (int64_t i = 0; i < count; ++i) x[i] = in[i];
  }
}

DGMOE_CPU_CLONES
void quant_block_row(const QuantBlockFp8Plan& plan, const BlockRow& at) {
  const int64_t columns = ceil_div(plan.k, kWeightBlock);
  const int64_t in_row = at.batch * plan.batch_stride + at.n0 * plan.row_stride;
  uint8_t* const q_row = plan.q + (at.batch * plan.n + at.n0) * plan.k;
  float* const scales =
      plan.scale + (at.batch * ceil_div(plan.n, kWeightBlock) + at.n0 / kWeightBlock) * columns;
  float x[kWeightBlock];
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t k0 = column * kWeightBlock;
    const int64_t count = plan.k - k0 < kWeightBlock ? plan.k - k0 : kWeightBlock;
    uint32_t amax_bits = 0;
    for (int64_t row = 0; row < at.n; ++row) {
      widen(plan, in_row + row * plan.row_stride + k0, count, x);
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
        amax_bits = magnitude > amax_bits ? magnitude : amax_bits;
      }
    }
    const GroupScale scale = group_scale(amax_bits, plan.power_of_two);
    scales[column] = scale.scale;
    for (int64_t row = 0; row < at.n; ++row) {
      widen(plan, in_row + row * plan.row_stride + k0, count, x);
      uint8_t* __restrict__ q = q_row + row * plan.k + k0;
      for (int64_t i = 0; i < count; ++i) q[i] = quantize(x[i], scale.multiplier);
    }
  }
}

std::tuple<Tensor, Tensor> quant_block_fp8_cpu(const Tensor& weight, bool round_scale) {
  QuantBlockFp8Call call = plan_quant_block_fp8(weight, round_scale);
  const QuantBlockFp8Plan& plan = call.plan;
  const int64_t block_rows = ceil_div(plan.n, kWeightBlock);
  parallel_items(plan.batches * block_rows, kWeightBlock * plan.k, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n0 = i % block_rows * kWeightBlock;
      quant_block_row(plan, {i / block_rows, n0, std::min(kWeightBlock, plan.n - n0)});
    }
  });
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kQuantBlockFp8Schema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("quant_block_fp8", DGMOE_BOX(dgmoe::quant_block_fp8_cpu));
}
DGMOE_CONTRACT(quant_block_fp8, kQuantBlockFp8Schema)
