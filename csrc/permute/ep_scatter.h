// ep_scatter: tokens to contiguous segments, one an expert, each padded to `alignment` rows.
//   x            [tokens, k] float8_e4m3fn or bfloat16, any strides
//   x_scale      [tokens, groups] float32 or [tokens, words] int32 (packed UE8M0), any strides;
//                None for bfloat16
//   topk_ids, num_local_experts, expert_start  as in moe_dispatch_index
//   scale_layout of the result: 0 or 1 for float32 scales, 2 for packed ones
//   alignment    rows to which a segment is padded, a multiple of 4
//   ->           rows [M, k] dtype of x, scale [M, columns] in scale_layout (or [0] float32),
//                m_indices [M] int32 expert or -1, src2dst [tokens, top_k] int32 row or -1
// M = alignment * (n + (A - n) // alignment), A = tokens * top_k, n = min(A, E): what the worst
// routing needs. Row order is token order; a token that names an expert twice has one row, shared
// by both slots. Rows with m_indices -1 stay unwritten; the scales of those within a segment are 1.
#pragma once

#include "../common/allocate.h"

namespace dgmoe {

constexpr char kEpScatterSchema[] =
    "ep_scatter(Tensor x, Tensor? x_scale, Tensor topk_ids, SymInt num_local_experts, *, SymInt"
    " expert_start=0, int scale_layout=1, SymInt alignment=128) -> (Tensor, Tensor, Tensor,"
    " Tensor)";

struct EpScatterPlan {
  IdMatrix ids;
  int64_t tokens, top_k, num_local_experts, expert_start, alignment, all_rows;
  const void* x;
  int64_t x_row_bytes, row_bytes;  // between rows of x; of one row
  const void* x_scale;             // null for bf16
  ScaleStrides x_strides;
  void* rows;
  void* scale;
  ScaleStrides strides;
  int32_t* m_indices;
  int32_t* src2dst;
  int32_t* counts;   // [E] scratch
  int32_t* offsets;  // [E] scratch
};

struct EpScatterCall {
  Tensor x;
  Tensor rows, scale, m_indices, src2dst, counts, offsets;
  EpScatterPlan plan;
};

inline EpScatterCall plan_ep_scatter(const Tensor& x, const std::optional<Tensor>& x_scale,
                                     const Tensor& topk_ids, int64_t num_local_experts,
                                     int64_t expert_start, int64_t scale_layout,
                                     int64_t alignment) {
  const Check check("ep_scatter");
  check.dtype("x", x, {ScalarType::Float8_e4m3fn, ScalarType::BFloat16});
  check.dim("x", x, 2, "(tokens, k)");
  const bool quantized = dtype_of(x) == ScalarType::Float8_e4m3fn;
  check.that(x_scale.has_value() == quantized, "x_scale",
             "be given for float8_e4m3fn x and only for it",
             x_scale.has_value() ? "a tensor" : "None");
  check.expert_ids("topk_ids", topk_ids, "x", x);
  check.size("topk_ids", topk_ids, 0, x.size(0), "the tokens of x");
  check.count("num_local_experts", num_local_experts);
  check.at_least("expert_start", expert_start, 0);
  const ScaleLayout form = check.scale_layout(scale_layout);
  check.alignment(alignment);
  int64_t groups = 0;
  if (quantized) {
    check.dtype("x_scale", *x_scale, {ScalarType::Float, ScalarType::Int});
    check.dim("x_scale", *x_scale, 2, "(tokens, groups)");
    check.size("x_scale", *x_scale, 0, x.size(0), "the tokens of x");
    check.same_device("x_scale", *x_scale, "x", x);
    const bool packed = dtype_of(*x_scale) == ScalarType::Int;
    check.that(packed == (form == ScaleLayout::kPackedUe8m0), "scale_layout",
               packed ? "be 2 for int32 (packed UE8M0) x_scale" : "be 0 or 1 for float32 x_scale",
               scale_layout);
    groups = x_scale->size(1) * (packed ? kGroupsPerWord : 1);
  }
  const int64_t tokens = x.size(0);
  const int64_t top_k = topk_ids.size(1);
  const int64_t all_rows = contig_rows(tokens * top_k, num_local_experts, alignment);
  check.that(all_rows <= INT32_MAX, "topk_ids", "need fewer than 2^31 rows", all_rows);
  Tensor in = with_aligned_rows(check.op(), "x", x);
  const int64_t element = static_cast<int64_t>(x.element_size());
  Tensor rows = empty(check.op(), "rows", {all_rows, x.size(1)}, dtype_of(x), x);
  ScaleTensor scale = quantized
                          ? empty_scale(check.op(), "scale", -1, all_rows, groups, form, x)
                          : ScaleTensor{empty(check.op(), "scale", {0}, ScalarType::Float, x), {}};
  Tensor m_indices = empty(check.op(), "m_indices", {all_rows}, ScalarType::Int, x);
  Tensor src2dst = empty(check.op(), "src2dst", {tokens, top_k}, ScalarType::Int, x);
  Tensor counts = empty(check.op(), "counts", {num_local_experts}, ScalarType::Int, x);
  Tensor offsets = empty(check.op(), "offsets", {num_local_experts}, ScalarType::Int, x);
  EpScatterPlan plan{id_matrix(topk_ids),
                     tokens,
                     top_k,
                     num_local_experts,
                     expert_start,
                     alignment,
                     all_rows,
                     data_of(in),
                     in.stride(0) * element,
                     x.size(1) * element,
                     quantized ? data_of(*x_scale) : nullptr,
                     quantized ? scale_strides_of(*x_scale, groups) : ScaleStrides{},
                     mutable_data_of(rows),
                     mutable_data_of(scale.tensor),
                     scale.strides,
                     static_cast<int32_t*>(mutable_data_of(m_indices)),
                     static_cast<int32_t*>(mutable_data_of(src2dst)),
                     static_cast<int32_t*>(mutable_data_of(counts)),
                     static_cast<int32_t*>(mutable_data_of(offsets))};
  return {in, rows, scale.tensor, m_indices, src2dst, counts, offsets, plan};
}

}  // namespace dgmoe
