// quant_block_fp8: weights to e4m3 with one fp32 scale a 128x128 block.
//   weight       [n, k] or [experts, n, k] bfloat16 or float32, any strides
//   round_scale  round scales up to powers of two (what UE8M0 targets need)
//   ->           q same shape float8_e4m3fn, contiguous,
//                scale [.., ceil(n / 128), ceil(k / 128)] float32, contiguous
// Numerics as in quant_group_fp8, the group being the block.
#pragma once

#include "../common/allocate.h"

namespace dgmoe {

constexpr char kQuantBlockFp8Schema[] =
    "quant_block_fp8(Tensor weight, bool round_scale=False) -> (Tensor, Tensor)";

struct QuantBlockFp8Plan {
  const void* weight;
  bool is_bf16;
  int64_t batch_stride, row_stride;  // of weight, in elements
  uint8_t* q;
  float* scale;
  int64_t batches, n, k;
  bool power_of_two;
};

struct QuantBlockFp8Call {
  Tensor weight;
  Tensor q, scale;
  QuantBlockFp8Plan plan;
};

inline QuantBlockFp8Call plan_quant_block_fp8(const Tensor& weight, bool round_scale) {
  const Check check("quant_block_fp8");
  check.dtype("weight", weight, {ScalarType::BFloat16, ScalarType::Float});
  const bool batched = weight.dim() == 3;
  if (!batched) check.dim("weight", weight, 2, "(n, k) or (experts, n, k)");
  const int64_t d = batched ? 1 : 0;
  const int64_t n = weight.size(d);
  const int64_t k = weight.size(d + 1);
  Tensor in = with_aligned_rows(check.op(), "weight", weight);
  Sizes sizes(weight.sizes().begin(), weight.sizes().end());
  Tensor q = empty(check.op(), "q", sizes, ScalarType::Float8_e4m3fn, weight);
  sizes[d] = ceil_div(n, kWeightBlock);
  sizes[d + 1] = ceil_div(k, kWeightBlock);
  Tensor scale = empty(check.op(), "scale", sizes, ScalarType::Float, weight);
  QuantBlockFp8Plan plan{data_of(in),
                         dtype_of(weight) == ScalarType::BFloat16,
                         batched ? in.stride(0) : 0,
                         in.stride(d),
                         static_cast<uint8_t*>(mutable_data_of(q)),
                         static_cast<float*>(mutable_data_of(scale)),
                         batched ? weight.size(0) : 1,
                         n,
                         k,
                         round_scale};
  return {in, q, scale, plan};
}

}  // namespace dgmoe
