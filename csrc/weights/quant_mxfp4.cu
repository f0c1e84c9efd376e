#include "mx.cuh"
#include "quant_mxfp4.h"

namespace dgmoe {
namespace {

// The sum over a group; both lanes of a pair add the same two numbers.
__device__ __forceinline__ float group_error(const float (&x)[8], float multiplier, float factor) {
  float sum = e2m1_error(x, multiplier, factor);
#pragma unroll
  for (int lane = 1; lane < kMxOctets; lane *= 2) sum += __shfl_xor_sync(group_lanes(), sum, lane);
  return sum;
}

template <typename Element>
__global__ void __launch_bounds__(kOctetThreads) quant_mxfp4_kernel(QuantMxfp4Plan plan) {
  const WeightRows& weight = plan.weight;
  const int64_t octets = weight.batches * weight.n * weight.groups() * kMxOctets;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kOctetThreads;
  // Rows start on 16 bytes where their length allows it.
  const bool vectors = weight.k % 8 == 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kOctetThreads + threadIdx.x; i < octets;
       i += step) {
    const Octet at = octet_at(weight, i);
    float x[8];
    uint8_t exponent = e2m1_exponent(load_octet<Element>(weight, at, vectors, x));
    const bool broken = exponent == kUe8m0Nan;
    if (plan.search) {
      // No early exit for a group with an inf or NaN: its lanes take part in the shuffles.
      const float plain = e2m1_multiplier(exponent);
      const float same = group_error(x, plain, 1.0f);
      const float less = group_error(x, plain, 0.5f);
      const float more = group_error(x, plain, 2.0f);
      exponent = broken ? kUe8m0Nan : best_exponent(exponent, same, less, more);
    }
    if (at.column % kMxGroup == 0) plan.scale[at.line * weight.groups() + at.group] = exponent;
    const float multiplier = e2m1_multiplier(exponent);
    uint32_t word = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const uint32_t code = broken ? 0u : float_to_e2m1(x[c] * multiplier);
      word |= code << (4 * c);
    }
    uint8_t* q = plan.q + (at.line * weight.k + at.column) / 2;
    if (vectors) {
      if (at.left > 0) *reinterpret_cast<uint32_t*>(q) = word;
    } else {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if (2 * b < at.left) q[b] = static_cast<uint8_t>(word >> (8 * b));
      }
    }
  }
}

std::tuple<Tensor, Tensor> quant_mxfp4_cuda(const Tensor& weight, bool search) {
  const CudaScope scope(weight);
  QuantMxfp4Call call = plan_quant_mxfp4(weight, search);
  launch_octets(quant_mxfp4_kernel<uint16_t>, quant_mxfp4_kernel<float>, scope, call.plan);
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("quant_mxfp4", DGMOE_BOX(dgmoe::quant_mxfp4_cuda));
}
