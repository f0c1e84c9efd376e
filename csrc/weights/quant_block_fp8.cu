#include "quant_block_fp8.h"

#include "../common/cuda.cuh"

namespace dgmoe {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 8;                           // columns a thread
constexpr int kRowThreads = kWeightBlock / kColumns;  // threads of a row
constexpr int kRowStep = kThreads / kRowThreads;      // rows at once
constexpr int kThreadRows = kWeightBlock / kRowStep;  // rows a thread

// A CTA a block of weights, which stays in registers between amax and rounding.
template <typename Element>
__global__ void __launch_bounds__(kThreads) quant_block_fp8_kernel(QuantBlockFp8Plan plan) {
  __shared__ uint32_t warp_amax[kThreads / 32];
  const int64_t block_rows = ceil_div(plan.n, kWeightBlock);
  const int64_t block_columns = ceil_div(plan.k, kWeightBlock);
  const int64_t blocks = plan.batches * block_rows * block_columns;
  // Rows start on 16 bytes where their length allows it.
  const bool vectors = plan.k % kColumns == 0;
  for (int64_t i = blockIdx.x; i < blocks; i += gridDim.x) {
    const int64_t batch = i / (block_rows * block_columns);
    const int64_t n0 = i / block_columns % block_rows * kWeightBlock + threadIdx.x / kRowThreads;
    const int64_t column = i % block_columns * kWeightBlock + threadIdx.x % kRowThreads * kColumns;
    const Element* weight =
        static_cast<const Element*>(plan.weight) + batch * plan.batch_stride + column;
    const int64_t left = plan.k - column;  // not positive: past the end

    float x[kThreadRows][kColumns];
    uint32_t amax_bits = 0;
    if (vectors && left > 0 && n0 + (kThreadRows - 1) * kRowStep < plan.n) {
      // Without a branch between them, so that all loads are in flight at once.
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
        load8(weight + (n0 + r * kRowStep) * plan.row_stride, x[r]);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
        const int64_t row = n0 + r * kRowStep;
        load_some(weight + row * plan.row_stride, row < plan.n ? left : 0, x[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const uint32_t row_amax = amax8_bits(x[r]);
      amax_bits = row_amax > amax_bits ? row_amax : amax_bits;
    }
    amax_bits = __reduce_max_sync(0xffffffffu, amax_bits);
    if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = amax_bits;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      amax_bits = warp_amax[w] > amax_bits ? warp_amax[w] : amax_bits;
    }
    __syncthreads();
    const GroupScale scale = group_scale(amax_bits, plan.power_of_two);
    if (threadIdx.x == 0) plan.scale[i] = scale.scale;
    uint8_t* q = plan.q + batch * plan.n * plan.k + column;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const int64_t row = n0 + r * kRowStep;
      if (row >= plan.n) continue;
      if (vectors) {
        if (left > 0) store8_e4m3(q + row * plan.k, x[r], scale.multiplier);
      } else {
        store_some_e4m3(q + row * plan.k, left, x[r], scale.multiplier);
      }
    }
  }
}

std::tuple<Tensor, Tensor> quant_block_fp8_cuda(const Tensor& weight, bool round_scale) {
  const CudaScope scope(weight);
  QuantBlockFp8Call call = plan_quant_block_fp8(weight, round_scale);
  const QuantBlockFp8Plan& plan = call.plan;
  const int64_t blocks =
      plan.batches * ceil_div(plan.n, kWeightBlock) * ceil_div(plan.k, kWeightBlock);
  const unsigned grid = grid_for(blocks, 16);
  if (plan.is_bf16) {
    DGMOE_LAUNCH(quant_block_fp8_kernel<uint16_t>, grid, kThreads, 0, scope, plan);
  } else {
    DGMOE_LAUNCH(quant_block_fp8_kernel<float>, grid, kThreads, 0, scope, plan);
  }
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("quant_block_fp8", DGMOE_BOX(dgmoe::quant_block_fp8_cuda));
}
