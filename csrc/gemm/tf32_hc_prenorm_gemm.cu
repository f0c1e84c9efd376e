#include "tf32_hc_prenorm_gemm.h"

#include "deep_gemm/deep_gemm.cuh"

namespace dgmoe {
namespace {

constexpr int64_t kLeastColumns = 8;

std::tuple<Tensor, Tensor> run(const Tensor& x, const Tensor& fn, std::optional<int64_t> num_splits,
                               const std::optional<Tensor>& out,
                               const std::optional<Tensor>& sqr_sum) {
  const CudaScope scope(x);
  Tf32HcPrenormGemmCall call = plan_tf32_hc_prenorm_gemm(x, fn, num_splits, out, sqr_sum);
  const Tf32HcPrenormGemmPlan& p = call.plan;
  // The library wants columns of the result, also where only the sums are asked for.
  const int64_t n = p.n > 0 || p.m == 0 ? p.n : kLeastColumns;
  Tensor rows = fn;
  Tensor d = call.out;
  if (n != p.n) {
    rows = empty("tf32_hc_prenorm_gemm", "padded fn", {n, p.k}, ScalarType::Float, fn);
    STD_CUDA_CHECK(
        cudaMemsetAsync(mutable_data_of(rows), 0, n * p.k * sizeof(float), scope.stream()));
    d = empty("tf32_hc_prenorm_gemm", "padded out",
              num_splits.has_value() ? Sizes{p.splits, p.m, n} : Sizes{p.m, n}, ScalarType::Float,
              fn);
  }
  const GroupedGemmSpec spec{GemmLayout::kDense, 1, p.m, n, p.k};
  deep_gemm(scope, {DeepGemmOp::kTf32HcPrenorm, "tf32_hc_prenorm_gemm", spec, &x, nullptr, &rows,
                    nullptr, nullptr, &d, &call.sqr_sum, num_splits.value_or(0)});
  return {call.out, call.sqr_sum};
}

std::tuple<Tensor, Tensor> tf32_hc_prenorm_gemm_cuda(const Tensor& x, const Tensor& fn,
                                                     std::optional<int64_t> num_splits) {
  return run(x, fn, num_splits, std::nullopt, std::nullopt);
}

void tf32_hc_prenorm_gemm_out_cuda(const Tensor& x, const Tensor& fn,
                                   std::optional<int64_t> num_splits, Tensor& out,
                                   Tensor& sqr_sum) {
  run(x, fn, num_splits, out, sqr_sum);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("tf32_hc_prenorm_gemm", DGMOE_BOX(dgmoe::tf32_hc_prenorm_gemm_cuda));
  m.impl("tf32_hc_prenorm_gemm.out", DGMOE_BOX(dgmoe::tf32_hc_prenorm_gemm_out_cuda));
}
