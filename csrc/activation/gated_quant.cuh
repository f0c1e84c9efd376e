// The CUDA kernel of both quantised gated activations.
#pragma once

#include "gated.cuh"

namespace dgmoe {

struct GatedQuantSink {
  static constexpr bool kPads = true;

  uint8_t* q;
  void* scale;
  ScaleLayout layout;
  int64_t rows, inter;
  int group_log2;
  bool power_of_two, round_activation;

  explicit GatedQuantSink(const GatedQuantPlan& plan)
      : q(plan.q),
        scale(plan.scale),
        layout(plan.layout),
        rows(plan.in.rows),
        inter(plan.in.inter),
        group_log2(plan.group_size == 32 ? 5 : 7),
        power_of_two(plan.power_of_two),
        round_activation(plan.round_activation) {}

  __device__ __forceinline__ void take(int64_t batch, int64_t row, int64_t column, int64_t count,
                                       float (&y)[kGatedColumns]) const {
    if (round_activation) {
#pragma unroll
      for (int i = 0; i < kGatedColumns; ++i) y[i] = bf16_to_float(float_to_bf16(y[i]));
    }
    // The halves of a warp may stand in different rows, so each shuffles alone.
    const uint32_t half = threadIdx.x % 32 < kGatedLanes ? 0x0000ffffu : 0xffff0000u;
    uint32_t amax_bits = amax8_bits(y);
    const int group_lanes = (1 << group_log2) / kGatedColumns;
    for (int offset = group_lanes / 2; offset > 0; offset /= 2) {
      const uint32_t other = __shfl_xor_sync(half, amax_bits, offset);
      amax_bits = other > amax_bits ? other : amax_bits;
    }
    if (count <= 0) return;
    const GroupScale group = group_scale(amax_bits, power_of_two);
    if ((threadIdx.x & (group_lanes - 1)) == 0) {
      store_scale(scale, layout, batch, row, column >> group_log2, group);
    }
    uint8_t* out = q + (batch * rows + row) * inter + column;
    if (inter % kGatedColumns == 0) {
      store8_e4m3(out, y, group.multiplier);
    } else {
      store_some_e4m3(out, count, y, group.multiplier);
    }
  }

  __device__ __forceinline__ void pad(int64_t batch, int64_t row, int64_t first,
                                      int64_t step) const {
    for (int64_t column = first; column < layout.columns(); column += step) {
      store_unit_scale(scale, layout, batch, row, column);
    }
  }
};

inline void gated_quant_cuda(const GatedQuantPlan& plan, const CudaScope& scope) {
  launch_gated(plan.in, scope, GatedQuantSink(plan));
}

}  // namespace dgmoe
