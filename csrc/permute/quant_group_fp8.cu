#include "quant_group_fp8.h"

#include "group_quant.cuh"
#include "rank_rows.cuh"

namespace dgmoe {
namespace {

constexpr int kThreads = 256;

template <int kLanes, typename Element>
__global__ void __launch_bounds__(kThreads) quant_group_fp8_kernel(QuantGroupFp8Plan plan) {
  const int64_t groups = plan.strides.groups;
  const int64_t items = plan.rows * groups;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kLanes);
  const int lane = threadIdx.x % kLanes;
  const bool aligned_in = plan.row_stride * sizeof(Element) % 16 == 0;
  const bool aligned_out = plan.padded_k % kPieceBytes == 0;
  // The bound is the warp's first item, so that all its lanes stay for the shuffles.
  const int in_warp = threadIdx.x % 32 / kLanes;
  const int64_t start =
      static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  for (int64_t first = start - in_warp; first < items; first += step) {
    const int64_t item = first + in_warp;
    const bool active = item < items;
    const int64_t row = active ? item / groups : 0;
    const int64_t group = active ? item - row * groups : 0;
    const int64_t column = group * (kLanes * kThreadColumns) + lane * kThreadColumns;
    const Element* x = static_cast<const Element*>(plan.x) + row * plan.row_stride;
    const QuantPiece piece =
        quantize_piece<kLanes>(x, column, active ? plan.k : 0, aligned_in, plan.power_of_two);
    if (!active) continue;
    if (column < plan.padded_k) {
      store_piece(plan.q + row * plan.padded_k, column, plan.padded_k, aligned_out, piece.bytes);
    }
    if (lane == 0) store_scale(plan.scale, plan.strides, 0, row, group, piece.scale);
  }
}

template <int kLanes>
void launch(const CudaScope& scope, const QuantGroupFp8Plan& plan) {
  const int64_t threads = plan.rows * plan.strides.groups * kLanes;
  const unsigned grid = grid_for(ceil_div(threads, kThreads), 32);
  if (plan.is_bf16) {
    const auto kernel = quant_group_fp8_kernel<kLanes, uint16_t>;
    DGMOE_LAUNCH(kernel, grid, kThreads, 0, scope, plan);
  } else {
    const auto kernel = quant_group_fp8_kernel<kLanes, float>;
    DGMOE_LAUNCH(kernel, grid, kThreads, 0, scope, plan);
  }
}

std::tuple<Tensor, Tensor> quant_group_fp8_cuda(const Tensor& x, int64_t group_size,
                                                int64_t scale_layout, bool round_scale,
                                                std::optional<int64_t> padded_k) {
  const CudaScope scope(x);
  QuantGroupFp8Call call = plan_quant_group_fp8(x, group_size, scale_layout, round_scale, padded_k);
  if (group_size == 128) {
    launch<128 / kThreadColumns>(scope, call.plan);
  } else {
    launch<32 / kThreadColumns>(scope, call.plan);
  }
  return {call.q, call.scale};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("quant_group_fp8", DGMOE_BOX(dgmoe::quant_group_fp8_cuda));
}
