#include "moe_dispatch_index.h"

#include "../common/contract.h"
#include "rank_rows.h"

namespace dgmoe {
namespace {

std::tuple<Tensor, Tensor> moe_dispatch_index_cpu(const Tensor& topk_ids, int64_t num_local_experts,
                                                  int64_t m_max, int64_t expert_start) {
  MoeDispatchIndexCall call =
      plan_moe_dispatch_index(topk_ids, num_local_experts, m_max, expert_start);
  rank_rows("moe_dispatch_index", call.plan);
  return {call.masked_m, call.src2dst};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kMoeDispatchIndexSchema); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("moe_dispatch_index", DGMOE_BOX(dgmoe::moe_dispatch_index_cpu));
}
DGMOE_CONTRACT(moe_dispatch_index, kMoeDispatchIndexSchema)
