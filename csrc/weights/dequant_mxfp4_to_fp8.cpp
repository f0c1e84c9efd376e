#include "dequant_mxfp4_to_fp8.h"

#include <algorithm>

#include "../common/contract.h"
#include "../common/parallel.h"

namespace dgmoe {
namespace {

constexpr int64_t kBlockGroups = kWeightBlock / kMxGroup;

// A block of `rows` rows and `groups` groups, the first of which is `group0` of row `row0`.
struct Block {
  int64_t batch, row0, rows, group0, groups;
};

uint8_t scale_of(const DequantMxfp4ToFp8Plan& plan, const Block& at) {
  uint32_t largest = 0;
  for (int64_t row = at.row0; row < at.row0 + at.rows; ++row) {
    for (int64_t group = at.group0; group < at.group0 + at.groups; ++group) {
      const uint32_t exponent = plan.scale(at.batch, row, group);
      if (exponent != kUe8m0Nan && exponent > largest) largest = exponent;
    }
  }
  return block_exponent(largest);
}

DGMOE_CPU_CLONES
void convert_block(const DequantMxfp4ToFp8Plan& plan, const Block& at, uint8_t exponent) {
  uint8_t table[16];  // what each code becomes in a group
  for (int64_t row = at.row0; row < at.row0 + at.rows; ++row) {
    const uint8_t* in = plan.weight + at.batch * plan.batch_stride + row * plan.row_stride;
    uint8_t* q = plan.q + (at.batch * plan.n + row) * plan.k;
    for (int64_t group = at.group0; group < at.group0 + at.groups; ++group) {
      const float multiplier = group_multiplier(plan.scale(at.batch, row, group), exponent);
      for (int code = 0; code < 16; ++code) {
        table[code] = float_to_e4m3(e2m1_to_float(static_cast<uint8_t>(code)) * multiplier);
      }
      const int64_t first = group * kMxGroup / 2;
      const int64_t last = first + kMxGroup / 2 < plan.k / 2 ? first + kMxGroup / 2 : plan.k / 2;
      for (int64_t i = first; i < last; ++i) {
        q[2 * i] = table[in[i] & 15];
        q[2 * i + 1] = table[in[i] >> 4];
      }
    }
  }
}

std::tuple<Tensor, Tensor> dequant_mxfp4_to_fp8_cpu(const Tensor& weight, const Tensor& scale) {
  DequantMxfp4ToFp8Call call = plan_dequant_mxfp4_to_fp8(weight, scale);
  const DequantMxfp4ToFp8Plan& plan = call.plan;
  const int64_t columns = plan.block_columns();
  const int64_t block_rows = plan.block_rows();
  parallel_items(plan.batches * block_rows * columns, kWeightBlock * kWeightBlock,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     const int64_t row0 = i / columns % block_rows * kWeightBlock;
                     const int64_t group0 = i % columns * kBlockGroups;
                     const Block at{i / columns / block_rows, row0,
                                    std::min(kWeightBlock, plan.n - row0), group0,
                                    std::min(kBlockGroups, plan.groups() - group0)};
                     plan.block_scale[i] = scale_of(plan, at);
                     convert_block(plan, at, plan.block_scale[i]);
                   }
                 });
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kDequantMxfp4ToFp8Schema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("dequant_mxfp4_to_fp8", DGMOE_BOX(dgmoe::dequant_mxfp4_to_fp8_cpu));
}
DGMOE_CONTRACT(dequant_mxfp4_to_fp8, kDequantMxfp4ToFp8Schema)
