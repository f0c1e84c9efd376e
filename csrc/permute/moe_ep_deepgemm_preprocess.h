// moe_ep_deepgemm_preprocess: count, place and quantise tokens into the slab that GEMM1 reads.
//   hidden_states      [tokens, hidden] bfloat16, any strides
//   topk_ids, num_local_experts, expert_start  as in moe_dispatch_index
//   group_size         32 or 128, or 0 to keep bfloat16
//   scale_layout, round_scale, padded_k  as in quant_group_fp8
//   m_max              slab rows an expert, default round_up(tokens, 256)
//   ->                 rows [E, m_max, padded_k] float8_e4m3fn (or bfloat16),
//                      scale [E, m_max, groups] in scale_layout (or [0] float32),
//                      masked_m [E] int32, src2dst [tokens, top_k] int32
// Rows from masked_m[e] on stay unwritten. Their scales are 1 up to the end of the 128-row tile
// that holds valid rows and stay unwritten beyond it.
#pragma once

#include "moe_dispatch_index.h"

namespace dgmoe {

constexpr char kMoeEpDeepgemmPreprocessSchema[] =
    "moe_ep_deepgemm_preprocess(Tensor hidden_states, Tensor topk_ids, SymInt"
    " num_local_experts, *, SymInt expert_start=0, int group_size=128, int scale_layout=1, bool"
    " round_scale=False, SymInt? padded_k=None, SymInt? m_max=None) -> (Tensor, Tensor, Tensor,"
    " Tensor)";

struct PreprocessPlan {
  DispatchIndexPlan index;
  const uint16_t* hidden;
  int64_t row_stride, k, padded_k;
  void* rows;  // e4m3 bytes, or bf16 where group_size is 0
  void* scale;
  ScaleStrides strides;
  int64_t group_size;
  bool power_of_two;
};

struct MoeEpDeepgemmPreprocessCall {
  Tensor hidden_states;
  Tensor rows, scale, masked_m, src2dst;
  PreprocessPlan plan;
};

inline MoeEpDeepgemmPreprocessCall plan_moe_ep_deepgemm_preprocess(
    const Tensor& hidden_states, const Tensor& topk_ids, int64_t num_local_experts,
    int64_t expert_start, int64_t group_size, int64_t scale_layout, bool round_scale,
    std::optional<int64_t> padded_k, std::optional<int64_t> m_max) {
  const Check check("moe_ep_deepgemm_preprocess");
  check.dtype("hidden_states", hidden_states, {ScalarType::BFloat16});
  check.dim("hidden_states", hidden_states, 2, "(tokens, hidden)");
  check.expert_ids("topk_ids", topk_ids, "hidden_states", hidden_states);
  check.size("topk_ids", topk_ids, 0, hidden_states.size(0), "the tokens of hidden_states");
  if (group_size != 0) check.group_size(group_size);
  const ScaleLayout form = check.scale_layout(scale_layout);
  const int64_t k = hidden_states.size(1);
  const int64_t width = check.padded("padded_k", padded_k, k);
  const int64_t slab = m_max.has_value() ? *m_max : slab_rows(hidden_states.size(0));
  MoeDispatchIndexCall index =
      plan_dispatch_index(check, topk_ids, num_local_experts, slab, expert_start);
  const bool quantized = group_size != 0;
  Tensor in = with_aligned_rows(check.op(), "hidden_states", hidden_states);
  Tensor rows = empty(check.op(), "rows", {num_local_experts, slab, width},
                      quantized ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16, hidden_states);
  ScaleTensor scale =
      quantized
          ? empty_scale(check.op(), "scale", num_local_experts, slab, ceil_div(width, group_size),
                        form, hidden_states)
          : ScaleTensor{empty(check.op(), "scale", {0}, ScalarType::Float, hidden_states), {}};
  PreprocessPlan plan{index.plan,
                      static_cast<const uint16_t*>(data_of(in)),
                      in.stride(0),
                      k,
                      width,
                      mutable_data_of(rows),
                      mutable_data_of(scale.tensor),
                      scale.strides,
                      group_size,
                      round_scale || form == ScaleLayout::kPackedUe8m0};
  return {in, rows, scale.tensor, index.masked_m, index.src2dst, plan};
}

}  // namespace dgmoe
