#include "block.cuh"
#include "dequant_mxfp4_to_fp8.h"

namespace dgmoe {
namespace {

constexpr int kBlockGroups = kWeightBlock / kMxGroup;

// Eight codes, the first in the lowest bits; what lies past the end is zero.
__device__ __forceinline__ uint32_t load_codes(const uint8_t* in, int64_t left, bool vectors) {
  if (left <= 0) return 0;
  if (vectors) return *reinterpret_cast<const uint32_t*>(in);
  uint32_t word = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (2 * b < left) word |= static_cast<uint32_t>(in[b]) << (8 * b);
  }
  return word;
}

// A CTA a block of weights.
__global__ void __launch_bounds__(kBlockThreads)
    dequant_mxfp4_to_fp8_kernel(DequantMxfp4ToFp8Plan plan) {
  __shared__ uint32_t warp_max[kBlockThreads / 32];
  const int64_t block_rows = plan.block_rows();
  const int64_t block_columns = plan.block_columns();
  const int64_t blocks = plan.batches * block_rows * block_columns;
  const bool vectors = plan.k % 8 == 0;
  for (int64_t i = blockIdx.x; i < blocks; i += gridDim.x) {
    const int64_t batch = i / (block_rows * block_columns);
    const int64_t row0 = i / block_columns % block_rows * kWeightBlock;
    const int64_t column0 = i % block_columns * kWeightBlock;

    uint32_t largest = 0;
    for (int64_t s = threadIdx.x; s < kWeightBlock * kBlockGroups; s += kBlockThreads) {
      const int64_t row = row0 + s / kBlockGroups;
      const int64_t group = column0 / kMxGroup + s % kBlockGroups;
      if (row >= plan.n || group >= plan.groups()) continue;
      const uint32_t exponent = plan.scale(batch, row, group);
      if (exponent != kUe8m0Nan && exponent > largest) largest = exponent;
    }
    const uint8_t block = block_exponent(block_max(largest, warp_max));
    if (threadIdx.x == 0) plan.block_scale[i] = block;

    const int64_t column = column0 + threadIdx.x % kBlockRowThreads * kBlockColumns;
    const int64_t left = plan.k - column;  // not positive: past the end
    if (left <= 0) continue;
#pragma unroll
    for (int r = 0; r < kBlockThreadRows; ++r) {
      const int64_t row = row0 + threadIdx.x / kBlockRowThreads + r * kBlockRowStep;
      if (row >= plan.n) break;
      const uint32_t word =
          load_codes(plan.weight + batch * plan.batch_stride + row * plan.row_stride + column / 2,
                     left, plan.vectors);
      const float multiplier = group_multiplier(plan.scale(batch, row, column / kMxGroup), block);
      float x[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) x[c] = e2m1_to_float(static_cast<uint8_t>(word >> (4 * c)));
      uint8_t* q = plan.q + (batch * plan.n + row) * plan.k + column;
      if (vectors) {
        store8_e4m3(q, x, multiplier);
      } else {
        store_some_e4m3(q, left, x, multiplier);
      }
    }
  }
}

std::tuple<Tensor, Tensor> dequant_mxfp4_to_fp8_cuda(const Tensor& weight, const Tensor& scale) {
  const CudaScope scope(weight);
  DequantMxfp4ToFp8Call call = plan_dequant_mxfp4_to_fp8(weight, scale);
  const DequantMxfp4ToFp8Plan& plan = call.plan;
  const unsigned grid = grid_for(plan.batches * plan.block_rows() * plan.block_columns(), 16);
  DGMOE_LAUNCH(dequant_mxfp4_to_fp8_kernel, grid, kBlockThreads, 0, scope, plan);
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("dequant_mxfp4_to_fp8", DGMOE_BOX(dgmoe::dequant_mxfp4_to_fp8_cuda));
}
