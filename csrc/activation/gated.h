// What the gated activations share: which rows of the GEMM1 output are valid, and the checks of
// that input.
#pragma once

#include "../common/check.h"

namespace dgmoe {

// gate_up is (batches, rows, 2 * inter), gate first; `batches` is 1 for the contiguous layout.
struct GatedPlan {
  const uint16_t* gate_up;
  int64_t batches, rows, inter;
  int64_t batch_stride, row_stride;  // of gate_up, in elements
  bool masked;               // by masked_m, whose pointer is null where there are no experts
  const int32_t* masked_m;   // [batches] valid rows
  const int32_t* m_indices;  // [rows] expert or -1, or null
  int64_t alignment;  // rows of a tile: padding within a tile of valid rows gets legal scales

  DGMOE_HD bool valid(int64_t batch, int64_t row) const {
    if (masked) return row < masked_m[batch];
    return m_indices == nullptr || m_indices[row] >= 0;
  }
  // Padding whose scale must be legal: it shares a tile with a valid row. Valid rows are a prefix
  // of their tile.
  DGMOE_HD bool in_tile(int64_t batch, int64_t row) const {
    return valid(batch, row / alignment * alignment);
  }
};

struct GatedInput {
  Tensor gate_up;  // keeps a re-aligned copy alive
  GatedPlan plan;
};

inline GatedInput plan_gated(const Check& check, const Tensor& gate_up,
                             const std::optional<Tensor>& masked_m,
                             const std::optional<Tensor>& m_indices, int64_t alignment) {
  check.dtype("gate_up", gate_up, {ScalarType::BFloat16});
  const bool batched = masked_m.has_value();
  check.dim("gate_up", gate_up, batched ? 3 : 2,
            batched ? "(experts, m, 2 * intermediate)" : "(m, 2 * intermediate)");
  const int64_t d = batched ? 1 : 0;
  check.that(gate_up.size(d + 1) % 2 == 0, "gate_up", "have an even last dimension, gate and up",
             shape_text(gate_up));
  if (batched) {
    check.dtype("masked_m", *masked_m, {ScalarType::Int});
    check.dim("masked_m", *masked_m, 1, "(experts,)");
    check.size("masked_m", *masked_m, 0, gate_up.size(0), "the experts of gate_up");
    check.same_device("masked_m", *masked_m, "gate_up", gate_up);
    check.contiguous("masked_m", *masked_m);
  }
  if (m_indices.has_value()) {
    check.that(!batched, "m_indices", "be None when masked_m is given", "both");
    check.dtype("m_indices", *m_indices, {ScalarType::Int});
    check.dim("m_indices", *m_indices, 1, "(m,)");
    check.size("m_indices", *m_indices, 0, gate_up.size(0), "the rows of gate_up");
    check.same_device("m_indices", *m_indices, "gate_up", gate_up);
    check.contiguous("m_indices", *m_indices);
  }
  check.at_least("alignment", alignment, 1);
  Tensor in = with_aligned_rows(gate_up);
  GatedPlan plan{static_cast<const uint16_t*>(data_of(in)),
                 batched ? gate_up.size(0) : 1,
                 gate_up.size(d),
                 gate_up.size(d + 1) / 2,
                 batched ? in.stride(0) : 0,
                 in.stride(d),
                 batched,
                 batched ? static_cast<const int32_t*>(data_of(*masked_m)) : nullptr,
                 m_indices.has_value() ? static_cast<const int32_t*>(data_of(*m_indices)) : nullptr,
                 alignment};
  return {in, plan};
}

// The quantised forms: what they write besides.
struct GatedQuantPlan {
  GatedPlan in;
  uint8_t* q;
  void* scale;
  ScaleLayout layout;
  int64_t group_size;
  bool power_of_two;
  bool round_activation;
};

struct GatedQuantCall {
  Tensor gate_up;
  Tensor q, scale;
  GatedQuantPlan plan;
};

inline GatedQuantCall plan_gated_quant(const Check& check, const Tensor& gate_up,
                                       const std::optional<Tensor>& masked_m,
                                       const std::optional<Tensor>& m_indices, int64_t group_size,
                                       int64_t scale_form, bool round_scale, bool round_activation,
                                       int64_t alignment) {
  check.group_size(group_size);
  const ScaleForm form = check.scale_form(scale_form);
  GatedInput in = plan_gated(check, gate_up, masked_m, m_indices, alignment);
  const bool batched = masked_m.has_value();
  const int64_t inter = in.plan.inter;
  Tensor q =
      empty(batched ? Sizes{in.plan.batches, in.plan.rows, inter} : Sizes{in.plan.rows, inter},
            ScalarType::Float8_e4m3fn, gate_up);
  ScaleTensor scale = empty_scale(batched ? in.plan.batches : -1, in.plan.rows,
                                  ceil_div(inter, group_size), form, gate_up);
  GatedQuantPlan plan{in.plan,
                      static_cast<uint8_t*>(mutable_data_of(q)),
                      mutable_data_of(scale.tensor),
                      scale.layout,
                      group_size,
                      round_scale || form == ScaleForm::kPackedUe8m0,
                      round_activation};
  return {in.gate_up, q, scale.tensor, plan};
}

}  // namespace dgmoe
