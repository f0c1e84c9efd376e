#include "unpack_ue8m0.h"

#include "../common/cuda.cuh"

namespace dgmoe {
namespace {

// A thread a word; the results of a row are contiguous.
__global__ void unpack_ue8m0_kernel(UnpackUe8m0Plan plan) {
  const ScaleStrides& strides = plan.strides;
  const int64_t columns = strides.columns();
  const int64_t words = plan.batches * plan.rows * columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
       i += step) {
    const int64_t line = i / columns;  // a row of a batch
    const int64_t column = i - line * columns;
    const int64_t batch = line / plan.rows;
    const uint32_t word =
        static_cast<const uint32_t*>(plan.in)[strides.at(batch, line - batch * plan.rows, column)];
    const int64_t group = column * kGroupsPerWord;
    float* out = plan.out + line * strides.groups + group;
#pragma unroll
    for (int64_t byte = 0; byte < kGroupsPerWord; ++byte) {
      if (group + byte < strides.groups) {
        out[byte] = ue8m0_to_float(static_cast<uint8_t>(word >> (8 * byte)));
      }
    }
  }
}

Tensor unpack_ue8m0_cuda(const Tensor& packed, int64_t groups) {
  const CudaScope scope(packed);
  UnpackUe8m0Call call = plan_unpack_ue8m0(packed, groups);
  const int64_t words = call.plan.batches * call.plan.rows * call.plan.strides.columns();
  DGMOE_LAUNCH(unpack_ue8m0_kernel, grid_for(ceil_div(words, 256), 8), 256, 0, scope, call.plan);
  return call.out;
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("unpack_ue8m0", DGMOE_BOX(dgmoe::unpack_ue8m0_cuda));
}
