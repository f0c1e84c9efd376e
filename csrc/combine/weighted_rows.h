// What the combining ops share: out[t] = (sum over slots i in order of fma(y[row(t, i)] + bias(t,
// i), weight(t, i), sum)) * factor.
#pragma once

#include "../common/output.h"

namespace dgmoe {

// The bias of the GEMM before: a row an expert, added in fp32.
struct RowBias {
  const void* data;  // null: none
  bool is_float;
  int64_t experts, row_stride;
  IdMatrix ids;
  int64_t expert_start;

  // The row of the bias of slot (t, i), or -1: an expert of another rank has none.
  DGMOE_HD int64_t offset(int64_t t, int64_t i) const {
    if (data == nullptr) return -1;
    const int64_t expert = ids.local_expert(t, i, expert_start, experts);
    return expert < 0 ? -1 : expert * row_stride;
  }
};

struct WeightedRowsPlan {
  const uint16_t* y;
  int64_t y_rows, y_row_stride;
  IdMatrix rows;  // -1, and anything outside y, is no row
  IdMatrix ids;   // negative ids are no row either; data null where only `rows` decides
  WeightMatrix weights;
  uint16_t* out;
  int64_t tokens, top_k, hidden;
  float factor;
  RowBias bias;

  // The row of y that slot (t, i) takes, or -1.
  DGMOE_HD int64_t row(int64_t t, int64_t i) const {
    if (ids.data != nullptr && ids(t, i) < 0) return -1;
    const int64_t r = rows(t, i);
    return r >= 0 && r < y_rows ? r : -1;
  }
};

struct WeightedRowsCall {
  Tensor y;    // keeps a re-aligned copy alive
  Tensor out;  // the caller's buffer where one was given
  WeightedRowsPlan plan;
  std::optional<Tensor> bias;  // keeps a re-aligned copy alive
};

inline WeightedRowsCall plan_weighted_rows(const Check& check, const Tensor& y,
                                           const char* rows_arg, const Tensor& rows,
                                           const std::optional<Tensor>& topk_ids,
                                           const Tensor& topk_weights, double factor,
                                           std::optional<int64_t> hidden_size,
                                           const std::optional<Tensor>& given_out = std::nullopt,
                                           const std::vector<NamedTensor>& others = {}) {
  check.dtype("y", y, {ScalarType::BFloat16});
  if (y.dim() != 3) check.dim("y", y, 2, "(rows, hidden) or (experts, m, hidden)");
  const int64_t y_rows = y.dim() == 3 ? y.size(0) * y.size(1) : y.size(0);
  check.ids(rows_arg, rows, "y", y);
  check.indices(rows_arg, rows, "rows of y", y_rows);
  if (topk_ids.has_value()) {
    check.expert_ids("topk_ids", *topk_ids, "y", y);
    check.size("topk_ids", *topk_ids, 0, rows.size(0), "the tokens");
    check.size("topk_ids", *topk_ids, 1, rows.size(1), "the slots of a token");
  }
  check.dtype("topk_weights", topk_weights,
              {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  check.dim("topk_weights", topk_weights, 2, "(tokens, top_k)");
  check.size("topk_weights", topk_weights, 0, rows.size(0), "the tokens");
  check.size("topk_weights", topk_weights, 1, rows.size(1), "the slots of a token");
  check.same_device("topk_weights", topk_weights, "y", y);
  // An infinite factor would make NaN of a token without a row.
  const float scale = check.float32("routed_scaling_factor", factor);
  const int64_t width = y.size(y.dim() - 1);
  const int64_t hidden = hidden_size.has_value() ? *hidden_size : width;
  check.that(hidden >= 0 && hidden <= width, "hidden_size",
             "be between 0 and the columns of y, " + std::to_string(width), hidden);
  std::vector<NamedTensor> inputs{{"y", y}, {rows_arg, rows}, {"topk_weights", topk_weights}};
  for (const NamedTensor& other : others) inputs.push_back(other);
  Tensor out =
      given_or_empty(check, "out", given_out, {rows.size(0), hidden}, ScalarType::BFloat16, inputs);
  // A slab is read as experts * m rows, so its experts must be contiguous.
  // The stride of a dimension of size 1 is meaningless: experts of one row are rows themselves.
  const bool single = y.dim() == 3 && y.size(1) == 1;
  const bool flat = y.dim() == 2 || single || y.stride(0) == y.size(1) * y.stride(1);
  Tensor in = with_aligned_rows(check.op(), "y", flat ? y : contiguous_copy(check.op(), "y", y));
  WeightedRowsPlan plan{static_cast<const uint16_t*>(data_of(in)),
                        y_rows,
                        in.stride(single ? 0 : in.dim() - 2),
                        id_matrix(rows),
                        topk_ids.has_value() ? id_matrix(*topk_ids) : IdMatrix{},
                        weight_matrix(topk_weights),
                        static_cast<uint16_t*>(mutable_data_of(out)),
                        rows.size(0),
                        rows.size(1),
                        hidden,
                        scale};
  return {in, out, plan};
}

}  // namespace dgmoe
