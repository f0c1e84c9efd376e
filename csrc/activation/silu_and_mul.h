// silu_and_mul: silu(gate) * up between the GEMMs of the bf16 recipe, in either layout.
//   gate_up    [experts, m, 2 * intermediate] with masked_m, or [m, 2 * intermediate]; bfloat16,
//              gate first, any strides
//   masked_m   [experts] int32 valid rows
//   m_indices  [m] int32 expert or -1 (padding); None: every row is valid
//   ->         [.., intermediate] bfloat16; rows that are not valid stay unwritten
// fp32 inside, one rounding to bf16. silu(x) = x / (1 + e^-x).
#pragma once

#include "gated.h"

namespace dgmoe {

constexpr char kSiluAndMulSchema[] =
    "silu_and_mul(Tensor gate_up, Tensor? masked_m=None, Tensor? m_indices=None) -> Tensor";

struct SiluAndMulPlan {
  GatedPlan in;
  uint16_t* out;
};

struct SiluAndMulCall {
  Tensor gate_up;
  Tensor out;
  SiluAndMulPlan plan;
};

inline SiluAndMulCall plan_silu_and_mul(const Tensor& gate_up,
                                        const std::optional<Tensor>& masked_m,
                                        const std::optional<Tensor>& m_indices) {
  const Check check("silu_and_mul");
  GatedInput in = plan_gated(check, gate_up, masked_m, m_indices, kTileRows);
  Tensor out = empty(masked_m.has_value() ? Sizes{in.plan.batches, in.plan.rows, in.plan.inter}
                                          : Sizes{in.plan.rows, in.plan.inter},
                     ScalarType::BFloat16, gate_up);
  return {in.gate_up, out, {in.plan, static_cast<uint16_t*>(mutable_data_of(out))}};
}

}  // namespace dgmoe
