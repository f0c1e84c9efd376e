// situ_and_mul_post_quant_contig: SiTU of segments, quantised for GEMM2 in one pass.
//   gate_up            [m, 2 * intermediate] bfloat16, any strides
//   m_indices          [m] int32 expert or -1 (padding); None: every row is valid
//   group_size         32 or 128
//   scale_layout, round_scale  as in quant_group_fp8
//   round_activation   round the product to bf16 before quantising (parity with peers)
//   alignment          rows to which segments are padded, a multiple of 4; each segment starts at a
//                      multiple of it
//   beta, linear_beta  positive
//   gate_up_interleave, bias  as in gated.h
//   ->                 q [m, intermediate] float8_e4m3fn,
//                      scale [m, ceil(intermediate / group_size)] in scale_layout
// Padding rows stay unwritten; their scales are 1 where they share a tile of `alignment` rows with
// valid ones.
// beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta) in fp32, quantised from
// fp32 with the scale as it is stored.
#pragma once

#include "gated_quant.h"

namespace dgmoe {

constexpr char kSituAndMulPostQuantContigSchema[] =
    "situ_and_mul_post_quant_contig(Tensor gate_up, Tensor? m_indices=None, *, float beta,"
    " float linear_beta, int group_size=128, int scale_layout=1, bool round_scale=False, bool"
    " round_activation=False, SymInt alignment=128, int gate_up_interleave=0, Tensor? bias=None) ->"
    " (Tensor, Tensor)";

inline GatedQuantCall plan_situ_and_mul_post_quant_contig(
    const Tensor& gate_up, const std::optional<Tensor>& m_indices, double beta, double linear_beta,
    int64_t group_size, int64_t scale_layout, bool round_scale, bool round_activation,
    int64_t alignment, int64_t gate_up_interleave, const std::optional<Tensor>& bias) {
  const Check check("situ_and_mul_post_quant_contig");
  return plan_gated_quant(check, gate_up, std::nullopt, m_indices, group_size, scale_layout,
                          round_scale, round_activation, alignment,
                          {situ_activation(check, beta, linear_beta), gate_up_interleave, bias});
}

}  // namespace dgmoe
