#include "silu_and_mul.h"

#include "gated.cuh"

namespace dgmoe {
namespace {

struct Bf16Sink {
  static constexpr bool kPads = false;

  uint16_t* out;
  int64_t rows, inter;

  __device__ __forceinline__ void take(int64_t batch, int64_t row, int64_t column, int64_t count,
                                       const float (&y)[kGatedColumns]) const {
    if (count <= 0) return;
    uint16_t* at = out + (batch * rows + row) * inter + column;
    if (inter % kGatedColumns == 0) {
      store8_bf16(at, y);
    } else {
      store_some_bf16(at, count, y);
    }
  }
};

Tensor silu_and_mul_cuda(const Tensor& gate_up, const std::optional<Tensor>& masked_m,
                         const std::optional<Tensor>& m_indices) {
  const CudaScope scope(gate_up);
  SiluAndMulCall call = plan_silu_and_mul(gate_up, masked_m, m_indices);
  const GatedPlan& in = call.plan.in;
  launch_gated(in, scope, Bf16Sink{call.plan.out, in.rows, in.inter});
  return call.out;
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("silu_and_mul", DGMOE_BOX(dgmoe::silu_and_mul_cuda));
}
