// The CUDA kernels of the gated activations that write bf16.
#include "gated.cuh"

namespace dgmoe {
namespace {

struct Bf16Sink {
  static constexpr bool kPads = false;

  uint16_t* out;
  int64_t rows, inter;

  template <GatedCase kCase>
  __device__ __forceinline__ void take(int32_t batch, int32_t row, int32_t column,
                                       const float (&y)[2][kGatedColumns]) const {
    uint16_t* at = out + (batch * rows + row) * inter + column;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t left = static_cast<int32_t>(inter) - column - h * kGatedHalf;
      if (left <= 0) continue;
      if (kCase != GatedCase::kAny || inter % kGatedColumns == 0) {
        store8_bf16(at + h * kGatedHalf, y[h]);
      } else {
        store_some_bf16(at + h * kGatedHalf, left, y[h]);
      }
    }
  }
};

}  // namespace

void gated_bf16_cuda(const GatedBf16Plan& plan, const CudaScope& scope) {
  launch_gated(plan.in, scope, Bf16Sink{plan.out, plan.in.rows, plan.in.inter});
}

}  // namespace dgmoe
