#include "align_scale.h"

#include "../common/cuda.cuh"

namespace dgmoe {
namespace {

constexpr int kTile = 32;  // rows and groups of a CTA's transpose
constexpr int kLines = 8;  // of them at a time

struct AlignTiles {
  int64_t rows, groups, count;

  explicit AlignTiles(const AlignScalePlan& plan)
      : rows(ceil_div(plan.padded_rows, kTile)),
        groups(ceil_div(plan.strides.groups, kTile)),
        count(plan.batches * rows * groups) {}
};

__global__ void __launch_bounds__(kTile* kLines)
    align_scale_kernel(AlignScalePlan plan, AlignTiles tiles) {
  __shared__ float tile[kTile][kTile + 1];  // [group][row], padded against bank conflicts
  // A warp reads along the dimension of the smaller stride.
  const bool along_groups = plan.in_group_stride < plan.in_row_stride;
  for (int64_t i = blockIdx.x; i < tiles.count; i += gridDim.x) {
    const int64_t first_row = i % tiles.rows * kTile;
    const int64_t first_group = i / tiles.rows % tiles.groups * kTile;
    const int64_t batch = i / tiles.rows / tiles.groups;
    const float* in = plan.in + batch * plan.in_batch_stride;
    for (int line = threadIdx.y; line < kTile; line += kLines) {
      const int r = along_groups ? line : threadIdx.x;
      const int g = along_groups ? threadIdx.x : line;
      const int64_t row = first_row + r;
      const int64_t group = first_group + g;
      const bool exists = row < plan.rows && group < plan.strides.groups;
      tile[g][r] = exists ? in[row * plan.in_row_stride + group * plan.in_group_stride] : 1.0f;
    }
    __syncthreads();
    const int64_t row = first_row + threadIdx.x;
    for (int line = threadIdx.y; line < kTile; line += kLines) {
      const int64_t group = first_group + line;
      if (row < plan.padded_rows && group < plan.strides.groups) {
        plan.out[plan.strides.at(batch, row, group)] = tile[line][threadIdx.x];
      }
    }
    __syncthreads();
  }
}

Tensor align_scale_cuda(const Tensor& scale) {
  const CudaScope scope(scale);
  AlignScaleCall call = plan_align_scale(scale);
  const AlignTiles tiles(call.plan);
  DGMOE_LAUNCH(align_scale_kernel, grid_for(tiles.count, 8), dim3(kTile, kLines), 0, scope,
               call.plan, tiles);
  return call.out;
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("align_scale", DGMOE_BOX(dgmoe::align_scale_cuda));
}
