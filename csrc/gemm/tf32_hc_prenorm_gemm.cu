#include "tf32_hc_prenorm_gemm.h"

#include "grouped_gemm_cuda.cuh"

namespace dgmoe {
namespace {

std::tuple<Tensor, Tensor> run(const Tensor& x, const Tensor& fn, std::optional<int64_t> num_splits,
                               const std::optional<Tensor>& out,
                               const std::optional<Tensor>& sqr_sum) {
  const CudaScope scope(x);
  Tf32HcPrenormGemmCall call = plan_tf32_hc_prenorm_gemm(x, fn, num_splits, out, sqr_sum);
  const Tf32HcPrenormGemmPlan& p = call.plan;
  // Without columns of the result the library would not compute the sums either.
  const Check check("tf32_hc_prenorm_gemm");
  check.that(p.n > 0 || p.m == 0, "fn", "have at least one row on CUDA", shape_text(fn));
  deep_gemm(scope,
            {DeepGemmOp::kTf32HcPrenorm, "tf32_hc_prenorm_gemm", &x, nullptr, &fn, nullptr, nullptr,
             1, p.m, p.n, p.k, 0, 0, 0, 0, num_splits.value_or(0), &call.out, &call.sqr_sum});
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
