#include "mx.cuh"
#include "quant_mxfp8.h"

namespace dgmoe {
namespace {

template <typename Element>
__global__ void __launch_bounds__(kOctetThreads) quant_mxfp8_kernel(QuantMxfp8Plan plan) {
  const WeightRows& weight = plan.weight;
  const int64_t octets = weight.batches * weight.n * weight.groups() * kMxOctets;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kOctetThreads;
  // Rows start on 16 bytes where their length allows it.
  const bool vectors = weight.k % 8 == 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kOctetThreads + threadIdx.x; i < octets;
       i += step) {
    const Octet at = octet_at(weight, i);
    float x[8];
    const GroupScale scale = group_scale(load_octet<Element>(weight, at, vectors, x), true);
    if (at.column % kMxGroup == 0) {
      plan.scale[at.line * weight.groups() + at.group] = scale.exponent;
    }
    uint8_t* q = plan.q + at.line * weight.k + at.column;
    if (vectors) {
      if (at.left > 0) store8_e4m3(q, x, scale.multiplier);
    } else {
      store_some_e4m3(q, at.left, x, scale.multiplier);
    }
  }
}

std::tuple<Tensor, Tensor> quant_mxfp8_cuda(const Tensor& weight) {
  const CudaScope scope(weight);
  QuantMxfp8Call call = plan_quant_mxfp8(weight);
  launch_octets(quant_mxfp8_kernel<uint16_t>, quant_mxfp8_kernel<float>, scope, call.plan);
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("quant_mxfp8", DGMOE_BOX(dgmoe::quant_mxfp8_cuda));
}
