#include "requant_block_ue8m0.h"

#include <algorithm>
#include <cstring>

#include "../common/contract.h"
#include "../common/parallel.h"

namespace dgmoe {
namespace {

DGMOE_HD void widen(const uint8_t* in, int64_t count, float scale, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] = e4m3_to_float(in[i]) * scale;
}

// Rows [n0, n0 + n) of an expert: a row of blocks.
DGMOE_CPU_CLONES
void requant_block_row(const RequantBlockUe8m0Plan& plan, int64_t batch, int64_t n0, int64_t n) {
  const int64_t columns = plan.block_columns();
  const int64_t block_row = n0 / kWeightBlock;
  const uint8_t* const in_row = plan.weight + batch * plan.batch_stride + n0 * plan.row_stride;
  uint8_t* const q_row = plan.q + (batch * plan.n + n0) * plan.k;
  uint8_t* const exponents = plan.exponent + (batch * plan.block_rows() + block_row) * columns;
  float x[kWeightBlock];
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t k0 = column * kWeightBlock;
    const int64_t count = plan.k - k0 < kWeightBlock ? plan.k - k0 : kWeightBlock;
    const BlockSource source = block_source(plan.scale, batch, block_row, column);
    if (source.keep) {
      exponents[column] = source.exponent;
      for (int64_t row = 0; row < n; ++row) {
        std::memcpy(q_row + row * plan.k + k0, in_row + row * plan.row_stride + k0, count);
      }
      continue;
    }
    uint32_t amax_bits = 0;
    for (int64_t row = 0; row < n; ++row) {
      widen(in_row + row * plan.row_stride + k0, count, source.scale, x);
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
        amax_bits = magnitude > amax_bits ? magnitude : amax_bits;
      }
    }
    const GroupScale scale = group_scale(amax_bits, true);
    exponents[column] = scale.exponent;
    for (int64_t row = 0; row < n; ++row) {
      widen(in_row + row * plan.row_stride + k0, count, source.scale, x);
      uint8_t* __restrict__ q = q_row + row * plan.k + k0;
      for (int64_t i = 0; i < count; ++i) q[i] = quantize(x[i], scale.multiplier);
    }
  }
}

std::tuple<Tensor, Tensor> requant_block_ue8m0_cpu(const Tensor& weight, const Tensor& scale) {
  RequantBlockUe8m0Call call = plan_requant_block_ue8m0(weight, scale);
  const RequantBlockUe8m0Plan& plan = call.plan;
  const int64_t block_rows = plan.block_rows();
  parallel_items(plan.batches * block_rows, kWeightBlock * plan.k, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n0 = i % block_rows * kWeightBlock;
      requant_block_row(plan, i / block_rows, n0, std::min(kWeightBlock, plan.n - n0));
    }
  });
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kRequantBlockUe8m0Schema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("requant_block_ue8m0", DGMOE_BOX(dgmoe::requant_block_ue8m0_cpu));
}
DGMOE_CONTRACT(requant_block_ue8m0, kRequantBlockUe8m0Schema)
