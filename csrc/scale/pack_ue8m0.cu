#include "pack_ue8m0.h"

#include "../common/cuda.cuh"

namespace dgmoe {
namespace {

// A thread a word; the words of a column are contiguous.
__global__ void pack_ue8m0_kernel(PackUe8m0Plan plan) {
  const int64_t columns = plan.strides.columns();
  const int64_t words = plan.batches * columns * plan.padded_rows;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
       i += step) {
    const int64_t row = i % plan.padded_rows;
    const int64_t column = i / plan.padded_rows % columns;
    const int64_t batch = i / plan.padded_rows / columns;
    if (row >= plan.rows) {
      store_unit_scale(plan.out, plan.strides, batch, row, column);
      continue;
    }
    uint32_t word = 0;
    for (int64_t byte = 0; byte < kGroupsPerWord; ++byte) {
      const int64_t group = column * kGroupsPerWord + byte;
      if (group >= plan.strides.groups) break;
      word |= static_cast<uint32_t>(plan.exponent(batch, row, group)) << (8 * byte);
    }
    static_cast<uint32_t*>(plan.out)[plan.strides.at(batch, row, column)] = word;
  }
}

Tensor pack_ue8m0_cuda(const Tensor& scale) {
  const CudaScope scope(scale);
  PackUe8m0Call call = plan_pack_ue8m0(scale);
  const int64_t words = call.plan.batches * call.plan.strides.columns() * call.plan.padded_rows;
  DGMOE_LAUNCH(pack_ue8m0_kernel, grid_for(ceil_div(words, 256), 8), 256, 0, scope, call.plan);
  return call.out;
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("pack_ue8m0", DGMOE_BOX(dgmoe::pack_ue8m0_cuda));
}
