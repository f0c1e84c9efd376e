// quant_group_fp8: rows to e4m3 with one scale a group of consecutive columns.
//   x            [rows, k] bfloat16 or float32, any strides
//   group_size   32 or 128
//   scale_layout 0 fp32 row-major, 1 fp32 MN-major TMA-aligned, 2 packed UE8M0 MN-major
//   round_scale  round fp32 scales up to powers of two; packed ones always are
//   padded_k     columns of the result, zero from k on
//   ->           q [rows, padded_k] float8_e4m3fn,
//                scale [rows, ceil(padded_k / group_size)] in scale_layout
// a = max(amax, 1e-10); scale a * fl(1/448) and multiplier 448 / a, or scale 2^ceil(log2(a / 448))
// and multiplier its inverse; values saturate at 448. A group with an inf or NaN gets scale NaN
// (byte 255) and NaN bytes.
#pragma once

#include "../common/allocate.h"

namespace dgmoe {

constexpr char kQuantGroupFp8Schema[] =
    "quant_group_fp8(Tensor x, int group_size, int scale_layout, bool round_scale=False, SymInt?"
    " padded_k=None) -> (Tensor, Tensor)";

struct QuantGroupFp8Plan {
  const void* x;
  bool is_bf16;
  int64_t row_stride;
  uint8_t* q;
  void* scale;
  ScaleStrides strides;
  int64_t rows, k, padded_k, group_size;
  bool power_of_two;
};

struct QuantGroupFp8Call {
  Tensor x;  // keeps a re-aligned copy alive until the kernel is queued
  Tensor q, scale;
  QuantGroupFp8Plan plan;
};

inline QuantGroupFp8Call plan_quant_group_fp8(const Tensor& x, int64_t group_size,
                                              int64_t scale_layout, bool round_scale,
                                              std::optional<int64_t> padded_k) {
  const Check check("quant_group_fp8");
  check.dtype("x", x, {ScalarType::BFloat16, ScalarType::Float});
  check.dim("x", x, 2, "(rows, k)");
  check.group_size(group_size);
  const ScaleLayout form = check.scale_layout(scale_layout);
  const int64_t rows = x.size(0);
  const int64_t k = x.size(1);
  const int64_t width = check.padded("padded_k", padded_k, k);
  Tensor in = with_aligned_rows(check.op(), "x", x);
  Tensor q = empty(check.op(), "q", {rows, width}, ScalarType::Float8_e4m3fn, x);
  ScaleTensor scale =
      empty_scale(check.op(), "scale", -1, rows, ceil_div(width, group_size), form, x);
  QuantGroupFp8Plan plan{data_of(in),
                         dtype_of(x) == ScalarType::BFloat16,
                         in.stride(0),
                         static_cast<uint8_t*>(mutable_data_of(q)),
                         mutable_data_of(scale.tensor),
                         scale.strides,
                         rows,
                         k,
                         width,
                         group_size,
                         round_scale || form == ScaleLayout::kPackedUe8m0};
  return {in, q, scale.tensor, plan};
}

}  // namespace dgmoe
