// The gated activations, a functor each over (gate, up) in fp32. A further one is a kind, a functor
// here, a case in gated_cpu.h and gated.cuh, a row in dgmoe_ops/layer/activations.py, and its oracle.
#pragma once

#include "../common/numerics.h"

namespace dgmoe {

enum class ActivationKind : int32_t { kSilu, kSwigluOai, kSitu };

struct ActivationParams {
  ActivationKind kind;
  float limit;  // gate is clamped from above and up from both sides; infinite: neither is
  float alpha;
  float beta, linear_beta;

  DGMOE_HD bool limited() const { return limit <= 3.402823466e38f; }
};

// A NaN stays one.
DGMOE_HD float clamp_above(float x, float limit) { return x > limit ? limit : x; }
DGMOE_HD float clamp_both(float x, float limit) {
  const float low = x < -limit ? -limit : x;
  return low > limit ? limit : low;
}

// The same bits on every device. A functor is a template over what it computes with, since a device
// may have something faster.
struct ExactMath {
  static DGMOE_HD float gate(float x, float z) { return dgmoe::gate(x, z); }
  static DGMOE_HD float tanh_quotient(float x, float y) { return tanh_f32(x / y); }
};

template <typename Math>
struct Silu {
  explicit DGMOE_HD Silu(const ActivationParams&) {}
  DGMOE_HD float operator()(float g, float u) const { return Math::gate(g, g) * u; }
};

template <typename Math>
struct SwigluOai {
  float alpha;
  explicit DGMOE_HD SwigluOai(const ActivationParams& params) : alpha(params.alpha) {}
  DGMOE_HD float operator()(float g, float u) const {
    return Math::gate(g, alpha * g) * (u + 1.0f);
  }
};

template <typename Math>
struct Situ {
  float beta, linear_beta;
  explicit DGMOE_HD Situ(const ActivationParams& params)
      : beta(params.beta), linear_beta(params.linear_beta) {}
  DGMOE_HD float operator()(float g, float u) const {
    const float bounded = beta * Math::tanh_quotient(g, beta);
    return Math::gate(bounded, g) * (linear_beta * Math::tanh_quotient(u, linear_beta));
  }
};

}  // namespace dgmoe
