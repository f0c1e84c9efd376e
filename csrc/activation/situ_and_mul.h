// situ_and_mul: SiTU between the GEMMs of the bf16 recipe, in either layout.
//   gate_up            [experts, m, 2 * intermediate] with masked_m, or [m, 2 * intermediate];
//                      bfloat16, any strides
//   masked_m           [experts] int32 valid rows
//   m_indices          [m] int32 expert or -1 (padding); None: every row is valid
//   beta, linear_beta  positive
//   gate_up_interleave, bias  as in gated.h
//   ->                 [.., intermediate] bfloat16; rows that are not valid stay unwritten
// beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta) in fp32, one rounding.
#pragma once

#include "gated.h"

namespace dgmoe {

constexpr char kSituAndMulSchema[] =
    "situ_and_mul(Tensor gate_up, Tensor? masked_m=None, Tensor? m_indices=None, *, float beta,"
    " float linear_beta, int gate_up_interleave=0, Tensor? bias=None) -> Tensor";

inline GatedBf16Call plan_situ_and_mul(const Tensor& gate_up, const std::optional<Tensor>& masked_m,
                                       const std::optional<Tensor>& m_indices, double beta,
                                       double linear_beta, int64_t gate_up_interleave,
                                       const std::optional<Tensor>& bias) {
  const Check check("situ_and_mul");
  return plan_gated_bf16(check, gate_up, masked_m, m_indices,
                         {situ_activation(check, beta, linear_beta), gate_up_interleave, bias});
}

}  // namespace dgmoe
