#include "some_rows.cuh"

#include "pair_cuda.cuh"

namespace dgmoe {

bool run_some_rows(const CudaScope& scope, const GroupedGemmPlan& plan, const Tensor& d,
                   int device) {
  const int64_t step_bytes = some_rows_prepared(plan.a_gran_k == 32);
  const auto launch = [&](const PairPlan& part, int64_t units) {
    for_mx_recipe(plan, [&](auto fp4, auto narrow) {
      constexpr bool kFp4 = decltype(fp4)::value;
      constexpr bool kNarrow = decltype(narrow)::value;
      static std::atomic<bool> ready[kMaxDevices] = {};
      launch_pair<SomeRowsShape<kFp4, kNarrow>::kBytes>(prepare_some_rows_kernel<kFp4, kNarrow>,
                                                        some_rows_kernel<kFp4, kNarrow>, ready,
                                                        part, units, scope, device);
    });
  };
  return run_pairs(plan, d, plan.k / kSomeRowsColumns * step_bytes, 0, launch);
}

}  // namespace dgmoe
