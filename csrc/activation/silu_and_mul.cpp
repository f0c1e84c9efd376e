#include "silu_and_mul.h"

#include "gated_cpu.h"

namespace dgmoe {
namespace {

DGMOE_CPU_CLONES
void silu_and_mul_rows(const SiluAndMulPlan& plan, int64_t batch, int64_t begin, int64_t end) {
  const GatedPlan& in = plan.in;
  for (int64_t row = begin; row < end; ++row) {
    if (!in.valid(batch, row)) continue;
    const uint16_t* gate = in.gate_up + batch * in.batch_stride + row * in.row_stride;
    const uint16_t* up = gate + in.inter;
    uint16_t* out = plan.out + (batch * in.rows + row) * in.inter;
    for (int64_t column = 0; column < in.inter; column += kGatedChunk) {
      const int64_t left = in.inter - column;
      const int64_t count = left < kGatedChunk ? left : kGatedChunk;
      float y[kGatedChunk];
      gated_chunk(gate + column, up + column, count, y);
      for (int64_t i = 0; i < count; ++i) out[column + i] = float_to_bf16(y[i]);
    }
  }
}

Tensor silu_and_mul_cpu(const Tensor& gate_up, const std::optional<Tensor>& masked_m,
                        const std::optional<Tensor>& m_indices) {
  SiluAndMulCall call = plan_silu_and_mul(gate_up, masked_m, m_indices);
  const SiluAndMulPlan& plan = call.plan;
  for_gated_rows(plan.in, [&](int64_t batch, int64_t begin, int64_t end) {
    silu_and_mul_rows(plan, batch, begin, end);
  });
  return call.out;
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kSiluAndMulSchema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("silu_and_mul", DGMOE_BOX(dgmoe::silu_and_mul_cpu));
}
