// The CUDA kernels of the gated activations that quantise.
#include "gated.cuh"

namespace dgmoe {
namespace {

__device__ __forceinline__ uint32_t max_over(uint32_t mask, uint32_t amax_bits, int lanes) {
  const uint32_t other = __shfl_xor_sync(mask, amax_bits, lanes);
  return other > amax_bits ? other : amax_bits;
}

struct GatedQuantSink {
  static constexpr bool kPads = true;

  uint8_t* q;
  void* scale;
  ScaleStrides strides;
  int64_t rows, inter;
  bool wide;  // groups of 128, a span each; else of 32, two of them a half
  bool power_of_two, round_activation;

  explicit GatedQuantSink(const GatedQuantPlan& plan)
      : q(plan.q),
        scale(plan.scale),
        strides(plan.strides),
        rows(plan.in.rows),
        inter(plan.in.inter),
        wide(plan.group_size == 128),
        power_of_two(plan.power_of_two),
        round_activation(plan.round_activation) {}

  template <GatedCase kCase>
  __device__ __forceinline__ void take(int32_t batch, int32_t row, int32_t column,
                                       float (&y)[2][kGatedColumns]) const {
    if (round_activation) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < kGatedColumns; ++i) y[h][i] = bf16_to_float(float_to_bf16(y[h][i]));
      }
    }
    // The spans of a warp may be of different rows, so each shuffles with its own mask.
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t mask = 0xffu << (lane & ~7u);
    uint32_t amax_bits[2] = {amax8_bits(y[0]), amax8_bits(y[1])};
    float multipliers[2];
    if (wide) {
      uint32_t both = amax_bits[0] > amax_bits[1] ? amax_bits[0] : amax_bits[1];
      both = max_over(mask, max_over(mask, max_over(mask, both, 4), 2), 1);
      const GroupScale group = group_scale(both, power_of_two);
      if (lane % kGatedLanes == 0) store_scale(scale, strides, batch, row, column / 128, group);
      multipliers[0] = multipliers[1] = group.multiplier;
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t most = max_over(mask, max_over(mask, amax_bits[h], 2), 1);
        const GroupScale group = group_scale(most, power_of_two);
        const int32_t first = column + h * kGatedHalf;
        if (lane % 4 == 0 && first < inter) {
          store_scale(scale, strides, batch, row, first / 32, group);
        }
        multipliers[h] = group.multiplier;
      }
    }
    uint8_t* out = q + (batch * rows + row) * inter + column;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t left = static_cast<int32_t>(inter) - column - h * kGatedHalf;
      if (left <= 0) continue;
      if (kCase != GatedCase::kAny || inter % kGatedColumns == 0) {
        store8_e4m3(out + h * kGatedHalf, y[h], multipliers[h]);
      } else {
        store_some_e4m3(out + h * kGatedHalf, left, y[h], multipliers[h]);
      }
    }
  }

  __device__ __forceinline__ void pad(int64_t batch, int64_t row, int64_t first,
                                      int64_t step) const {
    for (int64_t column = first; column < strides.columns(); column += step) {
      store_unit_scale(scale, strides, batch, row, column);
    }
  }
};

}  // namespace

void gated_quant_cuda(const GatedQuantPlan& plan, const CudaScope& scope) {
  launch_gated(plan.in, scope, GatedQuantSink(plan));
}

}  // namespace dgmoe
