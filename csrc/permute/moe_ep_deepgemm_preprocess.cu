#include "moe_ep_deepgemm_preprocess.h"

#include "group_quant.cuh"
#include "rank_rows.cuh"

namespace dgmoe {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPadBlocks = 4;  // blocks an expert that write unit scales

// The first `pad_blocks` blocks of the fill give padding rows their scales; the others place
// tokens.
__device__ void pad_scales(const PreprocessPlan& plan, unsigned pad_blocks) {
  const int64_t parts = plan.index.num_local_experts * kPadBlocks;
  for (int64_t part = blockIdx.x; part < parts; part += pad_blocks) {
    const int64_t expert = part / kPadBlocks;
    const int64_t valid = plan.index.masked_m[expert];
    const int64_t tile_end = round_up(valid, kTileRows);
    const int64_t end = tile_end < plan.index.m_max ? tile_end : plan.index.m_max;
    store_unit_scales(plan.scale, plan.strides, expert, valid, end,
                      part % kPadBlocks * kThreads + threadIdx.x, kPadBlocks * kThreads);
  }
}

template <int kLanes>
__global__ void __launch_bounds__(kThreads)
    fill_quantized_kernel(PreprocessPlan plan, unsigned pad_blocks) {
  if (blockIdx.x < pad_blocks) {
    pad_scales(plan, pad_blocks);
    return;
  }
  const int64_t top_k = plan.index.top_k;
  const int64_t m_max = plan.index.m_max;
  const int64_t groups = plan.strides.groups;
  const int64_t items = plan.index.tokens * groups;
  const int64_t step = static_cast<int64_t>(gridDim.x - pad_blocks) * (kThreads / kLanes);
  const int lane = threadIdx.x % kLanes;
  const bool aligned_in = plan.row_stride * sizeof(uint16_t) % 16 == 0;
  const bool aligned_out = plan.padded_k % kPieceBytes == 0;
  // The bound is the warp's first item, so that all its lanes stay for the shuffles.
  const int in_warp = threadIdx.x % 32 / kLanes;
  const int64_t block = blockIdx.x - pad_blocks;
  const int64_t start = block * (kThreads / kLanes) + threadIdx.x / kLanes;
  for (int64_t first = start - in_warp; first < items; first += step) {
    const int64_t item = first + in_warp;
    const int64_t token = item < items ? item / groups : 0;
    const int64_t group = item < items ? item - token * groups : 0;
    const int32_t* slots = plan.index.src2dst + token * top_k;
    const bool active = item < items && any_row(slots, top_k);
    const int64_t column = group * (kLanes * kThreadColumns) + lane * kThreadColumns;
    const QuantPiece piece =
        quantize_piece<kLanes>(plan.hidden + token * plan.row_stride, column, active ? plan.k : 0,
                               aligned_in, plan.power_of_two);
    if (!active) continue;
    if (column < plan.padded_k) {
      for_each_row(slots, top_k, [&](int64_t row) {
        store_piece(static_cast<uint8_t*>(plan.rows) + row * plan.padded_k, column, plan.padded_k,
                    aligned_out, piece.bytes);
      });
    }
    for (int64_t slot = lane; slot < top_k; slot += kLanes) {
      const int64_t row = __ldg(slots + slot);
      if (row < 0) continue;
      const int64_t expert = row / m_max;
      store_scale(plan.scale, plan.strides, expert, row - expert * m_max, group, piece.scale);
    }
  }
}

__global__ void __launch_bounds__(kThreads) fill_bf16_kernel(PreprocessPlan plan) {
  const int64_t in_bytes = plan.k * 2;
  const int64_t out_bytes = plan.padded_k * 2;
  const int64_t pieces = ceil_div(out_bytes, kPieceBytes);
  const int64_t items = plan.index.tokens * pieces;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const bool aligned_in = plan.row_stride * 2 % kPieceBytes == 0;
  const bool aligned_out = out_bytes % kPieceBytes == 0;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items;
       item += step) {
    const int64_t token = item / pieces;
    const int64_t offset = (item - token * pieces) * kPieceBytes;
    const int32_t* slots = plan.index.src2dst + token * plan.index.top_k;
    if (!any_row(slots, plan.index.top_k)) continue;
    const uint8_t* x = reinterpret_cast<const uint8_t*>(plan.hidden + token * plan.row_stride);
    const uint4 piece = load_piece(x, offset, in_bytes, aligned_in);
    for_each_row(slots, plan.index.top_k, [&](int64_t row) {
      store_piece(static_cast<uint8_t*>(plan.rows) + row * out_bytes, offset, out_bytes,
                  aligned_out, piece);
    });
  }
}

template <int kLanes>
void launch_quantized(const CudaScope& scope, const PreprocessPlan& plan) {
  const int64_t threads = plan.index.tokens * plan.strides.groups * kLanes;
  if (threads == 0) return;
  const unsigned pad_blocks = grid_for(plan.index.num_local_experts * kPadBlocks, 32);
  const unsigned grid = pad_blocks + grid_for(ceil_div(threads, kThreads), 32);
  DGMOE_LAUNCH(fill_quantized_kernel<kLanes>, grid, kThreads, 0, scope, plan, pad_blocks);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_ep_deepgemm_preprocess_cuda(
    const Tensor& hidden_states, const Tensor& topk_ids, int64_t num_local_experts,
    int64_t expert_start, int64_t group_size, int64_t scale_layout, bool round_scale,
    std::optional<int64_t> padded_k, std::optional<int64_t> m_max) {
  const CudaScope scope(hidden_states);
  MoeEpDeepgemmPreprocessCall call =
      plan_moe_ep_deepgemm_preprocess(hidden_states, topk_ids, num_local_experts, expert_start,
                                      group_size, scale_layout, round_scale, padded_k, m_max);
  const PreprocessPlan& plan = call.plan;
  rank_rows("moe_ep_deepgemm_preprocess", scope, plan.index, topk_ids);
  if (group_size == 128) {
    launch_quantized<128 / kThreadColumns>(scope, plan);
  } else if (group_size == 32) {
    launch_quantized<32 / kThreadColumns>(scope, plan);
  } else if (num_local_experts > 0) {
    const int64_t threads = plan.index.tokens * ceil_div(plan.padded_k * 2, kPieceBytes);
    DGMOE_LAUNCH(fill_bf16_kernel, grid_for(ceil_div(threads, kThreads), 32), kThreads, 0, scope,
                 plan);
  }
  return {call.rows, call.scale, call.masked_m, call.src2dst};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("moe_ep_deepgemm_preprocess", DGMOE_BOX(dgmoe::moe_ep_deepgemm_preprocess_cuda));
}
