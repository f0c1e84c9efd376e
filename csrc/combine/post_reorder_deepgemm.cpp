#include "post_reorder_deepgemm.h"

#include "../common/contract.h"
#include "weighted_rows_cpu.h"

namespace dgmoe {
namespace {

Tensor post_reorder_deepgemm_cpu(const Tensor& y, const Tensor& src2dst, const Tensor& topk_weights,
                                 double routed_scaling_factor, std::optional<int64_t> hidden_size,
                                 const std::optional<Tensor>& bias,
                                 const std::optional<Tensor>& topk_ids, int64_t expert_start) {
  WeightedRowsCall call = plan_post_reorder_deepgemm(
      y, src2dst, topk_weights, routed_scaling_factor, hidden_size, bias, topk_ids, expert_start);
  weighted_rows_cpu(call.plan);
  return call.out;
}

void post_reorder_deepgemm_out_cpu(const Tensor& y, const Tensor& src2dst,
                                   const Tensor& topk_weights, double routed_scaling_factor,
                                   std::optional<int64_t> hidden_size,
                                   const std::optional<Tensor>& bias,
                                   const std::optional<Tensor>& topk_ids, int64_t expert_start,
                                   Tensor& out) {
  // Named, so that a re-aligned copy of y outlives the loop.
  WeightedRowsCall call =
      plan_post_reorder_deepgemm(y, src2dst, topk_weights, routed_scaling_factor, hidden_size, bias,
                                 topk_ids, expert_start, out);
  weighted_rows_cpu(call.plan);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) {
  m.def(dgmoe::kPostReorderDeepgemmSchema);
  m.def(dgmoe::kPostReorderDeepgemmOutSchema);
}
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("post_reorder_deepgemm", DGMOE_BOX(dgmoe::post_reorder_deepgemm_cpu));
  m.impl("post_reorder_deepgemm.out", DGMOE_BOX(dgmoe::post_reorder_deepgemm_out_cpu));
}
DGMOE_CONTRACT(post_reorder_deepgemm, kPostReorderDeepgemmOutSchema)
