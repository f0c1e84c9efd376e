#include "ep_gather.h"

#include "../common/contract.h"
#include "weighted_rows_cpu.h"

namespace dgmoe {
namespace {

Tensor ep_gather_cpu(const Tensor& y, const Tensor& topk_ids, const Tensor& topk_weights,
                     const Tensor& output_index, std::optional<int64_t> hidden_size) {
  WeightedRowsCall call = plan_ep_gather(y, topk_ids, topk_weights, output_index, hidden_size);
  weighted_rows_cpu(call.plan);
  return call.out;
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kEpGatherSchema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) { m.impl("ep_gather", DGMOE_BOX(dgmoe::ep_gather_cpu)); }
DGMOE_CONTRACT(ep_gather, kEpGatherSchema)
