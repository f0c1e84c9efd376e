// silu_and_mul_post_quant_contig: silu(gate) * up of segments, quantised for GEMM2 in one pass.
//   gate_up            [m, 2 * intermediate] bfloat16, gate first, any strides
//   m_indices          [m] int32 expert or -1 (padding); None: every row is valid
//   group_size         32 or 128
//   scale_form, round_scale  as in quant_group_fp8
//   round_activation   round the product to bf16 before quantising (parity with peers)
//   alignment          rows to which segments are padded
//   ->                 q [m, intermediate] float8_e4m3fn,
//                      scale [m, ceil(intermediate / group_size)] in scale_form
// Padding rows stay unwritten; their scales are 1 where they share a tile of `alignment` rows with
// valid ones.
#pragma once

#include "gated.h"

namespace dgmoe {

constexpr char kSiluAndMulPostQuantContigSchema[] =
    "silu_and_mul_post_quant_contig(Tensor gate_up, Tensor? m_indices=None, *, int"
    " group_size=128, int scale_form=1, bool round_scale=False, bool round_activation=False,"
    " SymInt alignment=128) -> (Tensor, Tensor)";

inline GatedQuantCall plan_silu_and_mul_post_quant_contig(const Tensor& gate_up,
                                                          const std::optional<Tensor>& m_indices,
                                                          int64_t group_size, int64_t scale_form,
                                                          bool round_scale, bool round_activation,
                                                          int64_t alignment) {
  const Check check("silu_and_mul_post_quant_contig");
  return plan_gated_quant(check, gate_up, std::nullopt, m_indices, group_size, scale_form,
                          round_scale, round_activation, alignment);
}

}  // namespace dgmoe
