#include "ep_scatter.h"

#include "rank_rows.cuh"

namespace dgmoe {
namespace {

constexpr int kThreads = 256;

// Names the rows of the segments, gives their padding scale 1, and marks what lies past the last
// segment.
__device__ void finish_segments(const EpScatterPlan& plan, unsigned segment_blocks) {
  const int64_t experts = plan.num_local_experts;
  for (int64_t e = blockIdx.x; e < experts; e += segment_blocks) {
    const int64_t begin = plan.offsets[e];
    const int64_t valid = begin + plan.counts[e];
    const int64_t end = begin + round_up(plan.counts[e], plan.alignment);
    for (int64_t row = begin + threadIdx.x; row < end; row += kThreads) {
      plan.m_indices[row] = row < valid ? static_cast<int32_t>(e) : -1;
    }
    store_unit_scales(plan.scale, plan.strides, 0, valid, end, threadIdx.x, kThreads);
  }
  const int64_t used =
      plan.offsets[experts - 1] + round_up(plan.counts[experts - 1], plan.alignment);
  const int64_t step = static_cast<int64_t>(segment_blocks) * kThreads;
  for (int64_t row = used + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       row < plan.all_rows; row += step) {
    plan.m_indices[row] = -1;
  }
}

// The first `segment_blocks` blocks finish the segments; the others copy tokens, in pieces of 16
// bytes and scale words.
__global__ void __launch_bounds__(kThreads)
    fill_segments_kernel(EpScatterPlan plan, unsigned segment_blocks) {
  if (blockIdx.x < segment_blocks) {
    finish_segments(plan, segment_blocks);
    return;
  }
  const int64_t pieces = ceil_div(plan.row_bytes, kPieceBytes);
  const int64_t parts = pieces + plan.strides.columns();
  const int64_t items = plan.tokens * parts;
  const int64_t step = static_cast<int64_t>(gridDim.x - segment_blocks) * kThreads;
  const bool aligned_in = plan.x_row_bytes % kPieceBytes == 0;
  const bool aligned_out = plan.row_bytes % kPieceBytes == 0;
  const int64_t block = blockIdx.x - segment_blocks;
  for (int64_t item = block * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t token = item / parts;
    const int64_t part = item - token * parts;
    const int32_t* slots = plan.src2dst + token * plan.top_k;
    if (!any_row(slots, plan.top_k)) continue;
    if (part >= pieces) {
      const int64_t column = part - pieces;
      const uint32_t word =
          static_cast<const uint32_t*>(plan.x_scale)[plan.x_strides.at(0, token, column)];
      for_each_row(slots, plan.top_k, [&](int64_t row) {
        static_cast<uint32_t*>(plan.scale)[plan.strides.at(0, row, column)] = word;
      });
      continue;
    }
    const int64_t offset = part * kPieceBytes;
    const uint4 piece = load_piece(static_cast<const uint8_t*>(plan.x) + token * plan.x_row_bytes,
                                   offset, plan.row_bytes, aligned_in);
    for_each_row(slots, plan.top_k, [&](int64_t row) {
      store_piece(static_cast<uint8_t*>(plan.rows) + row * plan.row_bytes, offset, plan.row_bytes,
                  aligned_out, piece);
    });
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ep_scatter_cuda(
    const Tensor& x, std::optional<Tensor> x_scale, const Tensor& topk_ids,
    int64_t num_local_experts, int64_t expert_start, int64_t scale_layout, int64_t alignment) {
  const CudaScope scope(x);
  EpScatterCall call = plan_ep_scatter(x, x_scale, topk_ids, num_local_experts, expert_start,
                                       scale_layout, alignment);
  const EpScatterPlan& plan = call.plan;
  if (plan.tokens * plan.top_k > 0) {
    const DispatchIndexPlan index{plan.ids, plan.tokens,  plan.top_k,  num_local_experts,
                                  0,        expert_start, plan.counts, plan.src2dst};
    rank_rows("ep_scatter", scope, index, topk_ids, Segments{plan.offsets, alignment});
  }
  if (plan.all_rows > 0) {
    const int64_t parts = ceil_div(plan.row_bytes, kPieceBytes) + plan.strides.columns();
    const unsigned segment_blocks = grid_for(num_local_experts, 8);
    const unsigned grid = segment_blocks + grid_for(ceil_div(plan.tokens * parts, kThreads), 32);
    DGMOE_LAUNCH(fill_segments_kernel, grid, kThreads, 0, scope, plan, segment_blocks);
  }
  return {call.rows, call.scale, call.m_indices, call.src2dst};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("ep_scatter", DGMOE_BOX(dgmoe::ep_scatter_cuda));
}
