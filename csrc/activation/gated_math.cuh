// What the CUDA kernels compute the activations with: arithmetic that the hardware approximates.
#pragma once

#include "../common/cuda.cuh"
#include "functors.h"

namespace dgmoe {

// Some 1e-6 off relatively, which moves about one fp8 value in 10^5 by a step. Non-finite input
// gives what it gives exactly. Results below 2^-119 or so become zero.
struct FastMath {
  static constexpr float kLog2E = 1.44269504f;

  static __device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float gate(float x, float z) {
    return x * reciprocal(1.0f + exp2(-kLog2E * z));
  }
};

// SiTU is bound by the special function units; this takes half as many of their operations: the
// three quotients share a reciprocal. No exponent is positive, so that no factor overflows.
template <>
struct Situ<FastMath> {
  float beta, linear_beta, inverse, linear_inverse;

  explicit DGMOE_HD Situ(const ActivationParams& params)
      : beta(params.beta),
        linear_beta(params.linear_beta),
        inverse(1.0f / params.beta),
        linear_inverse(1.0f / params.linear_beta) {}

  struct Quotient {
    float above, below;
  };
  static __device__ __forceinline__ Quotient tanh_quotient(float magnitude) {
    const float decay = FastMath::exp2(-2.0f * FastMath::kLog2E * magnitude);
    const float square = magnitude * magnitude;
    float p = fused_multiply_add(square, -0x1.b6c788p-5f, 0x1.1105f4p-3f);
    p = fused_multiply_add(p, square, -0x1.55553ep-2f);
    const float near = fused_multiply_add(p * square, magnitude, magnitude);
    const bool is_near = magnitude < 0.25f;  // where 1 - decay cancels
    return {is_near ? near : 1.0f - decay, is_near ? 1.0f : 1.0f + decay};
  }
  __device__ __forceinline__ float operator()(float g, float u) const {
    const Quotient gate = tanh_quotient(fabsf(g * inverse));
    const Quotient up = tanh_quotient(fabsf(u * linear_inverse));
    const float decay = FastMath::exp2(-FastMath::kLog2E * fabsf(g));
    const float sigmoid = g < 0.0f ? decay : 1.0f;  // over 1 + decay
    const float below = FastMath::reciprocal(gate.below * up.below * (1.0f + decay));
    const float y = beta * gate.above * sigmoid * below * (linear_beta * up.above);
    return bits_float(float_bits(y) | ((float_bits(g) ^ float_bits(u)) & 0x80000000u));
  }
};

}  // namespace dgmoe
