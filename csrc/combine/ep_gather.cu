#include "ep_gather.h"

#include "weighted_rows.cuh"

namespace dgmoe {
namespace {

Tensor ep_gather_cuda(const Tensor& y, const Tensor& topk_ids, const Tensor& topk_weights,
                      const Tensor& output_index, std::optional<int64_t> hidden_size) {
  const CudaScope scope(y);
  WeightedRowsCall call = plan_ep_gather(y, topk_ids, topk_weights, output_index, hidden_size);
  weighted_rows_cuda(call.plan, scope);
  return call.out;
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) { m.impl("ep_gather", DGMOE_BOX(dgmoe::ep_gather_cuda)); }
