// situ_and_mul_post_quant_masked: SiTU of a slab, quantised for GEMM2 in one pass.
//   gate_up            [experts, m, 2 * intermediate] bfloat16, any strides
//   masked_m           [experts] int32 valid rows
//   group_size         32 or 128
//   scale_layout, round_scale  as in quant_group_fp8
//   round_activation   round the product to bf16 before quantising (parity with peers)
//   beta, linear_beta  positive
//   gate_up_interleave, bias  as in gated.h
//   ->                 q [experts, m, intermediate] float8_e4m3fn,
//                      scale [experts, m, ceil(intermediate / group_size)] in scale_layout
// Rows from masked_m[e] on stay unwritten; their scales are 1 up to the end of the 128-row tile
// that holds valid rows.
// beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta) in fp32, quantised from
// fp32 with the scale as it is stored.
#pragma once

#include "gated_quant.h"

namespace dgmoe {

constexpr char kSituAndMulPostQuantMaskedSchema[] =
    "situ_and_mul_post_quant_masked(Tensor gate_up, Tensor masked_m, *, float beta, float"
    " linear_beta, int group_size=128, int scale_layout=1, bool round_scale=False, bool"
    " round_activation=False, int gate_up_interleave=0, Tensor? bias=None) -> (Tensor, Tensor)";

inline GatedQuantCall plan_situ_and_mul_post_quant_masked(
    const Tensor& gate_up, const Tensor& masked_m, double beta, double linear_beta,
    int64_t group_size, int64_t scale_layout, bool round_scale, bool round_activation,
    int64_t gate_up_interleave, const std::optional<Tensor>& bias) {
  const Check check("situ_and_mul_post_quant_masked");
  return plan_gated_quant(check, gate_up, masked_m, std::nullopt, group_size, scale_layout,
                          round_scale, round_activation, kTileRows,
                          {situ_activation(check, beta, linear_beta), gate_up_interleave, bias});
}

}  // namespace dgmoe
