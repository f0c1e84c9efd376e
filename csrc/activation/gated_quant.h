// What the quantised gated activations write besides, and its checks.
#pragma once

#include "gated.h"

namespace dgmoe {

struct GatedQuantPlan {
  GatedPlan in;
  uint8_t* q;
  void* scale;
  ScaleStrides strides;
  int64_t group_size;
  bool power_of_two;
  bool round_activation;
};

struct GatedQuantCall {
  GatedInput input;
  Tensor q, scale;
  GatedQuantPlan plan;
};

inline GatedQuantCall plan_gated_quant(const Check& check, const Tensor& gate_up,
                                       const std::optional<Tensor>& masked_m,
                                       const std::optional<Tensor>& m_indices, int64_t group_size,
                                       int64_t scale_layout, bool round_scale,
                                       bool round_activation, int64_t alignment,
                                       const GatedOptions& options) {
  check.group_size(group_size);
  const ScaleLayout form = check.scale_layout(scale_layout);
  GatedInput in = plan_gated(check, gate_up, masked_m, m_indices, alignment, options, true);
  const bool batched = masked_m.has_value();
  const int64_t inter = in.plan.inter;
  Tensor q =
      empty(check.op(), "q",
            batched ? Sizes{in.plan.batches, in.plan.rows, inter} : Sizes{in.plan.rows, inter},
            ScalarType::Float8_e4m3fn, gate_up);
  ScaleTensor scale = empty_scale(check.op(), "scale", batched ? in.plan.batches : -1, in.plan.rows,
                                  ceil_div(inter, group_size), form, gate_up);
  GatedQuantPlan plan{in.plan,
                      static_cast<uint8_t*>(mutable_data_of(q)),
                      mutable_data_of(scale.tensor),
                      scale.strides,
                      group_size,
                      round_scale || form == ScaleLayout::kPackedUe8m0,
                      round_activation};
  return {in, q, scale.tensor, plan};
}

}  // namespace dgmoe
