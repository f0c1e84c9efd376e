// silu_and_mul: silu(gate) * up between the GEMMs of the bf16 recipe, in either layout.
//   gate_up            [experts, m, 2 * intermediate] with masked_m, or [m, 2 * intermediate];
//                      bfloat16, any strides
//   masked_m           [experts] int32 valid rows
//   m_indices          [m] int32 expert or -1 (padding); None: every row is valid
//   swiglu_limit       clamps gate from above and up from both sides first
//   gemm1_alpha        given: gate sigmoid(alpha gate) (up + 1) instead, after the same clamp by
//   gemm1_clamp_limit  .. this one
//   gate_up_interleave, bias  as in gated.h
//   ->                 [.., intermediate] bfloat16; rows that are not valid stay unwritten
// fp32 inside, one rounding to bf16. silu(x) = x / (1 + e^-x).
#pragma once

#include "gated.h"

namespace dgmoe {

constexpr char kSiluAndMulSchema[] =
    "silu_and_mul(Tensor gate_up, Tensor? masked_m=None, Tensor? m_indices=None, *, float?"
    " swiglu_limit=None, float? gemm1_alpha=None, float? gemm1_clamp_limit=None,"
    " int gate_up_interleave=0, Tensor? bias=None) -> Tensor";

inline GatedBf16Call plan_silu_and_mul(const Tensor& gate_up, const std::optional<Tensor>& masked_m,
                                       const std::optional<Tensor>& m_indices,
                                       std::optional<double> swiglu_limit,
                                       std::optional<double> gemm1_alpha,
                                       std::optional<double> gemm1_clamp_limit,
                                       int64_t gate_up_interleave,
                                       const std::optional<Tensor>& bias) {
  const Check check("silu_and_mul");
  return plan_gated_bf16(check, gate_up, masked_m, m_indices,
                         {silu_activation(check, swiglu_limit, gemm1_alpha, gemm1_clamp_limit),
                          gate_up_interleave, bias});
}

}  // namespace dgmoe
