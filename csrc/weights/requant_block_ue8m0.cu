#include "block.cuh"
#include "requant_block_ue8m0.h"

namespace dgmoe {
namespace {

// Eight e4m3 codes; what lies past the end is zero.
__device__ __forceinline__ uint2 load_codes(const uint8_t* in, int64_t left, bool vectors) {
  if (left <= 0) return make_uint2(0, 0);
  if (vectors) return *reinterpret_cast<const uint2*>(in);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int b = 0; b < 8; ++b) {
    if (b < left) words[b / 4] |= static_cast<uint32_t>(in[b]) << (8 * (b % 4));
  }
  return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ void store_codes(uint8_t* out, int64_t left, bool vectors, uint2 codes) {
  if (vectors) {
    if (left > 0) *reinterpret_cast<uint2*>(out) = codes;
    return;
  }
#pragma unroll
  for (int b = 0; b < 8; ++b) {
    const uint32_t word = b < 4 ? codes.x : codes.y;
    if (b < left) out[b] = static_cast<uint8_t>(word >> (8 * (b % 4)));
  }
}

__device__ __forceinline__ void widen(uint2 codes, float scale, float (&x)[8]) {
#pragma unroll
  for (int b = 0; b < 8; ++b) {
    const uint32_t word = b < 4 ? codes.x : codes.y;
    x[b] = e4m3_to_float(static_cast<uint8_t>(word >> (8 * (b % 4)))) * scale;
  }
}

// A CTA a block of weights, whose codes stay in registers between amax and rounding.
__global__ void __launch_bounds__(kBlockThreads)
    requant_block_ue8m0_kernel(RequantBlockUe8m0Plan plan) {
  __shared__ uint32_t warp_amax[kBlockThreads / 32];
  const int64_t block_rows = plan.block_rows();
  const int64_t block_columns = plan.block_columns();
  const int64_t blocks = plan.batches * block_rows * block_columns;
  const bool vectors = plan.k % kBlockColumns == 0;
  for (int64_t i = blockIdx.x; i < blocks; i += gridDim.x) {
    const int64_t batch = i / (block_rows * block_columns);
    const int64_t block_row = i / block_columns % block_rows;
    const int64_t n0 = block_row * kWeightBlock + threadIdx.x / kBlockRowThreads;
    const int64_t column =
        i % block_columns * kWeightBlock + threadIdx.x % kBlockRowThreads * kBlockColumns;
    const int64_t left = plan.k - column;  // not positive: past the end
    const BlockSource source = block_source(plan.scale, batch, block_row, i % block_columns);

    uint2 codes[kBlockThreadRows];
#pragma unroll
    for (int r = 0; r < kBlockThreadRows; ++r) {
      const int64_t row = n0 + r * kBlockRowStep;
      codes[r] =
          load_codes(plan.weight + batch * plan.batch_stride + row * plan.row_stride + column,
                     row < plan.n ? left : 0, plan.vectors);
    }
    GroupScale scale{0.0f, source.exponent, 0.0f};
    if (!source.keep) {  // the same for all threads
      uint32_t amax_bits = 0;
#pragma unroll
      for (int r = 0; r < kBlockThreadRows; ++r) {
        const int64_t row = n0 + r * kBlockRowStep;
        // Zeros past the end must not be multiplied by an infinite scale.
        const int64_t valid = row < plan.n ? left : 0;
        float x[8];
        widen(codes[r], source.scale, x);
#pragma unroll
        for (int b = 0; b < 8; ++b) {
          const uint32_t magnitude = b < valid ? float_bits(x[b]) & 0x7fffffffu : 0u;
          amax_bits = magnitude > amax_bits ? magnitude : amax_bits;
        }
      }
      scale = group_scale(block_max(amax_bits, warp_amax), true);
    }
    if (threadIdx.x == 0) plan.exponent[i] = scale.exponent;
    uint8_t* q = plan.q + batch * plan.n * plan.k + column;
#pragma unroll
    for (int r = 0; r < kBlockThreadRows; ++r) {
      const int64_t row = n0 + r * kBlockRowStep;
      if (row >= plan.n) continue;
      if (source.keep) {
        store_codes(q + row * plan.k, left, vectors, codes[r]);
        continue;
      }
      float x[8];
      widen(codes[r], source.scale, x);
      if (vectors) {
        if (left > 0) store8_e4m3(q + row * plan.k, x, scale.multiplier);
      } else {
        store_some_e4m3(q + row * plan.k, left, x, scale.multiplier);
      }
    }
  }
}

std::tuple<Tensor, Tensor> requant_block_ue8m0_cuda(const Tensor& weight, const Tensor& scale) {
  const CudaScope scope(weight);
  RequantBlockUe8m0Call call = plan_requant_block_ue8m0(weight, scale);
  const RequantBlockUe8m0Plan& plan = call.plan;
  const unsigned grid = grid_for(plan.batches * plan.block_rows() * plan.block_columns(), 16);
  DGMOE_LAUNCH(requant_block_ue8m0_kernel, grid, kBlockThreads, 0, scope, plan);
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("requant_block_ue8m0", DGMOE_BOX(dgmoe::requant_block_ue8m0_cuda));
}
