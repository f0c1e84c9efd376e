// tf32_hc_prenorm_gemm: out = x @ fn^T and the row sums of x * x, in one pass over x.
//   x           [m, k] bfloat16, contiguous
//   fn          [n, k] float32, contiguous
//   num_splits  pieces of k, at least 1: both results then hold a sum a piece, to be added by the
//               caller. Pieces are runs of 64-wide blocks of k: every piece gets
//               blocks / num_splits of them, and the first blocks % num_splits pieces one more.
//               A piece without a block gives zeros.
//   out, sqr_sum  (overload .out) contiguous buffers for the results, on 16 bytes
//   ->          out [m, n] and sqr_sum [m], or [num_splits, m, n] and [num_splits, m]; float32
// fp32 accumulation. The CPU multiplies fn as it is; a GPU's TF32 cores drop the low 13 bits of its
// mantissa, which moves out by at most 2^-10 of sum |x| |fn|. x * x is exact in fp32 and only its
// sum rounds.
#pragma once

#include "../common/output.h"

namespace dgmoe {

constexpr char kTf32HcPrenormGemmSchema[] =
    "tf32_hc_prenorm_gemm(Tensor x, Tensor fn, *, int? num_splits=None) -> (Tensor, Tensor)";

constexpr char kTf32HcPrenormGemmOutSchema[] =
    "tf32_hc_prenorm_gemm.out(Tensor x, Tensor fn, *, int? num_splits=None, Tensor(a!) out,"
    " Tensor(b!) sqr_sum) -> ()";

constexpr int64_t kSplitBlock = 64;  // pieces begin at multiples of this many columns

struct Tf32HcPrenormGemmPlan {
  const uint16_t* x;
  const float* fn;
  float* out;      // [splits, m, n]
  float* sqr_sum;  // [splits, m]
  int64_t m, n, k;
  int64_t splits;

  // The first column of a piece; of piece `splits`, k.
  DGMOE_HD int64_t piece_begin(int64_t piece) const {
    const int64_t blocks = ceil_div(k, kSplitBlock);
    const int64_t longer = blocks % splits;
    const int64_t block = piece * (blocks / splits) + (piece < longer ? piece : longer);
    return block * kSplitBlock < k ? block * kSplitBlock : k;
  }
};

struct Tf32HcPrenormGemmCall {
  Tensor out, sqr_sum;  // the caller's buffers where they were given
  Tf32HcPrenormGemmPlan plan;
};

inline Tf32HcPrenormGemmCall plan_tf32_hc_prenorm_gemm(const Tensor& x, const Tensor& fn,
                                                       std::optional<int64_t> num_splits,
                                                       const std::optional<Tensor>& out = {},
                                                       const std::optional<Tensor>& sqr_sum = {}) {
  const Check check("tf32_hc_prenorm_gemm");
  check.dtype("x", x, {ScalarType::BFloat16});
  check.dtype("fn", fn, {ScalarType::Float});
  check.dim("x", x, 2, "(m, k)");
  check.dim("fn", fn, 2, "(n, k)");
  check.same_device("fn", fn, "x", x);
  check.size("fn", fn, 1, x.size(1), "k of x");
  check.contiguous("x", x);
  check.contiguous("fn", fn);
  const int64_t splits = num_splits.has_value() ? *num_splits : 1;
  check.that(splits >= 1 && splits <= INT32_MAX, "num_splits", "be at least 1 and below 2^31",
             splits);
  const int64_t m = x.size(0);
  const int64_t n = fn.size(0);
  const bool split = num_splits.has_value();
  const Sizes sum_sizes = split ? Sizes{splits, m} : Sizes{m};
  const Sizes sizes = split ? Sizes{splits, m, n} : Sizes{m, n};
  Tensor d = given_or_empty(check, "out", out, sizes, ScalarType::Float, {{"x", x}, {"fn", fn}});
  Tensor sums = given_or_empty(check, "sqr_sum", sqr_sum, sum_sizes, ScalarType::Float,
                               {{"x", x}, {"fn", fn}, {"out", d}});
  const Tf32HcPrenormGemmPlan plan{static_cast<const uint16_t*>(data_of(x)),
                                   static_cast<const float*>(data_of(fn)),
                                   static_cast<float*>(mutable_data_of(d)),
                                   static_cast<float*>(mutable_data_of(sums)),
                                   m,
                                   n,
                                   x.size(1),
                                   splits};
  return {d, sums, plan};
}

}  // namespace dgmoe
