// What the gated activations share: which rows of the GEMM1 output are valid, the order of gate and
// up in them, which bias they take, and the checks of all that. Every op of the room takes
//   gate_up_interleave  columns of gate_up: 0, gate then up; 8, eight of gate and eight of up in
//                       turn (a multiple of 8 of each); 1, one of each in turn
//   bias                [experts, 2 * intermediate] float32 or bfloat16, any strides, columns as
//                       those of gate_up; added in fp32. The expert is the slab's, or that of
//                       m_indices; one past the last row of bias has none
// The formulas are those of functors.h in fp32. On CUDA the hardware approximates exponential and
// quotient: of 10^4 e4m3 values at most one is off, by one step; an fp32 scale by 2e-6 relatively; of
// 10^4 power-of-two scales at most one, by a factor of two. With DGMOE_EXACT_ACTIVATION=1 the bits are
// those of the CPU. What is not finite is so in either.
#pragma once

#include <limits>

#include "../common/allocate.h"
#include "functors.h"

namespace dgmoe {

struct GatedBias {
  const void* data;  // null: none
  bool is_float;
  int64_t experts, row_stride;
};

// gate_up is (batches, rows, 2 * inter); `batches` is 1 for the contiguous layout.
struct GatedPlan {
  const uint16_t* gate_up;
  int64_t batches, rows, inter;
  int64_t batch_stride, row_stride;  // of gate_up, in elements
  bool masked;               // by masked_m, whose pointer is null where there are no experts
  const int32_t* masked_m;   // [batches] valid rows
  const int32_t* m_indices;  // [rows] expert or -1, or null
  int64_t alignment;  // rows of a tile: padding within a tile of valid rows gets legal scales
  int32_t gate_up_interleave;  // 0, 1 or 8
  GatedBias bias;
  ActivationParams activation;

  DGMOE_HD bool valid(int64_t batch, int64_t row) const {
    if (masked) return row < masked_m[batch];
    return m_indices == nullptr || m_indices[row] >= 0;
  }
  // Padding whose scale must be legal: it shares a tile with a valid row. Valid rows are a prefix
  // of their tile.
  DGMOE_HD bool in_tile(int64_t batch, int64_t row) const {
    return valid(batch, row / alignment * alignment);
  }
  // The row of the bias that a valid row takes, or -1.
  DGMOE_HD int64_t bias_row(int64_t batch, int64_t row) const {
    if (bias.data == nullptr) return -1;
    const int64_t expert = masked ? batch : m_indices[row];
    return expert < bias.experts ? expert : -1;
  }
};

struct GatedInput {
  Tensor gate_up;              // keeps a re-aligned copy alive
  std::optional<Tensor> bias;  // likewise
  GatedPlan plan;
};

// The options of an op.
struct GatedOptions {
  ActivationParams activation;
  int64_t gate_up_interleave;
  const std::optional<Tensor>& bias;
};

inline float limit_or_infinity(const Check& check, const char* arg, std::optional<double> limit) {
  return limit.has_value() ? check.positive_float32(arg, *limit)
                           : std::numeric_limits<float>::infinity();
}

inline ActivationParams silu_activation(const Check& check, std::optional<double> swiglu_limit,
                                        std::optional<double> gemm1_alpha,
                                        std::optional<double> gemm1_clamp_limit) {
  if (!gemm1_alpha.has_value()) {
    check.that(!gemm1_clamp_limit.has_value(), "gemm1_clamp_limit",
               "be None without gemm1_alpha (swiglu_limit clamps SiLU)",
               gemm1_clamp_limit.value_or(0));
    const float limit = limit_or_infinity(check, "swiglu_limit", swiglu_limit);
    return {ActivationKind::kSilu, limit, 1.0f, 1.0f, 1.0f};
  }
  check.that(!swiglu_limit.has_value(), "swiglu_limit",
             "be None with gemm1_alpha (gemm1_clamp_limit clamps then)", swiglu_limit.value_or(0));
  const float limit = limit_or_infinity(check, "gemm1_clamp_limit", gemm1_clamp_limit);
  return {ActivationKind::kSwigluOai, limit, check.float32("gemm1_alpha", *gemm1_alpha), 1.0f,
          1.0f};
}

inline ActivationParams situ_activation(const Check& check, double beta, double linear_beta) {
  return {ActivationKind::kSitu, std::numeric_limits<float>::infinity(), 1.0f,
          check.positive_float32("beta", beta), check.positive_float32("linear_beta", linear_beta)};
}

// `padded` says that padding within a tile of `alignment` rows is written.
inline GatedInput plan_gated(const Check& check, const Tensor& gate_up,
                             const std::optional<Tensor>& masked_m,
                             const std::optional<Tensor>& m_indices, int64_t alignment,
                             const GatedOptions& options, bool padded) {
  check.dtype("gate_up", gate_up, {ScalarType::BFloat16});
  const bool batched = masked_m.has_value();
  check.dim("gate_up", gate_up, batched ? 3 : 2,
            batched ? "(experts, m, 2 * intermediate)" : "(m, 2 * intermediate)");
  const int64_t d = batched ? 1 : 0;
  for (int64_t i = 0; i < gate_up.dim(); ++i) {  // kernels count them by 32 bits
    check.that(gate_up.size(i) <= INT32_MAX, "gate_up", "have sizes below 2^31",
               shape_text(gate_up));
  }
  check.that(gate_up.size(d + 1) % 2 == 0, "gate_up", "have an even last dimension, gate and up",
             shape_text(gate_up));
  if (batched) {
    check.dtype("masked_m", *masked_m, {ScalarType::Int});
    check.dim("masked_m", *masked_m, 1, "(experts,)");
    check.size("masked_m", *masked_m, 0, gate_up.size(0), "the experts of gate_up");
    check.same_device("masked_m", *masked_m, "gate_up", gate_up);
    check.contiguous("masked_m", *masked_m);
    check.counts("masked_m", *masked_m, "rows", gate_up.size(1));
  }
  if (m_indices.has_value()) {
    check.that(!batched, "m_indices", "be None when masked_m is given", "both");
    check.dtype("m_indices", *m_indices, {ScalarType::Int});
    check.dim("m_indices", *m_indices, 1, "(m,)");
    check.size("m_indices", *m_indices, 0, gate_up.size(0), "the rows of gate_up");
    check.same_device("m_indices", *m_indices, "gate_up", gate_up);
    check.contiguous("m_indices", *m_indices);
  }
  check.alignment(alignment);
  const int64_t inter = gate_up.size(d + 1) / 2;
  const int64_t gate_up_interleave = options.gate_up_interleave;
  check.that(gate_up_interleave == 0 || gate_up_interleave == 1 || gate_up_interleave == 8,
             "gate_up_interleave", "be 0, 1 or 8", gate_up_interleave);
  check.that(gate_up_interleave != 8 || inter % 8 == 0, "gate_up",
             "have a last dimension that is a multiple of 16 with gate_up_interleave 8",
             shape_text(gate_up));
  std::optional<Tensor> bias;
  if (options.bias.has_value()) {
    check.dtype("bias", *options.bias, {ScalarType::Float, ScalarType::BFloat16});
    check.dim("bias", *options.bias, 2, "(experts, 2 * intermediate)");
    if (batched) check.size("bias", *options.bias, 0, gate_up.size(0), "the experts of gate_up");
    check.size("bias", *options.bias, 1, 2 * inter, "the columns of gate_up");
    check.same_device("bias", *options.bias, "gate_up", gate_up);
    check.that(batched || m_indices.has_value(), "m_indices", "be given with a bias", "None");
    bias = with_aligned_rows(check.op(), "bias", *options.bias);
  }
  if (m_indices.has_value()) {
    check.indices("m_indices", *m_indices, "experts", bias.has_value() ? bias->size(0) : kEveryId,
                  padded ? alignment : 0);
  }
  Tensor in = with_aligned_rows(check.op(), "gate_up", gate_up);
  GatedPlan plan{static_cast<const uint16_t*>(data_of(in)),
                 batched ? gate_up.size(0) : 1,
                 gate_up.size(d),
                 inter,
                 batched ? in.stride(0) : 0,
                 in.stride(d),
                 batched,
                 batched ? static_cast<const int32_t*>(data_of(*masked_m)) : nullptr,
                 m_indices.has_value() ? static_cast<const int32_t*>(data_of(*m_indices)) : nullptr,
                 alignment,
                 static_cast<int32_t>(gate_up_interleave),
                 bias.has_value() ? GatedBias{data_of(*bias), dtype_of(*bias) == ScalarType::Float,
                                              bias->size(0), bias->stride(0)}
                                  : GatedBias{},
                 options.activation};
  return {in, bias, plan};
}

// ---- without quantisation ----

struct GatedBf16Plan {
  GatedPlan in;
  uint16_t* out;
};

struct GatedBf16Call {
  GatedInput input;
  Tensor out;
  GatedBf16Plan plan;
};

inline GatedBf16Call plan_gated_bf16(const Check& check, const Tensor& gate_up,
                                     const std::optional<Tensor>& masked_m,
                                     const std::optional<Tensor>& m_indices,
                                     const GatedOptions& options) {
  GatedInput in = plan_gated(check, gate_up, masked_m, m_indices, kTileRows, options, false);
  Tensor out = empty(check.op(), "out",
                     masked_m.has_value() ? Sizes{in.plan.batches, in.plan.rows, in.plan.inter}
                                          : Sizes{in.plan.rows, in.plan.inter},
                     ScalarType::BFloat16, gate_up);
  const GatedBf16Plan plan{in.plan, static_cast<uint16_t*>(mutable_data_of(out))};
  return {in, out, plan};
}

}  // namespace dgmoe
