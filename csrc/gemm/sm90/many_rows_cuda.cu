#include "many_rows.cuh"

#include "pair_cuda.cuh"

namespace dgmoe {

bool run_many_rows(const CudaScope& scope, const GroupedGemmPlan& plan, const Tensor& d,
                   int device) {
  constexpr int64_t kColumnBytes = kManyRowsWideBytes / kManyRowsColumns;
  const auto launch = [&](const PairPlan& part, int64_t units) {
    for_mx_recipe(plan, [&](auto fp4, auto narrow) {
      constexpr bool kFp4 = decltype(fp4)::value;
      constexpr bool kNarrow = decltype(narrow)::value;
      static std::atomic<bool> ready[kMaxDevices] = {};
      launch_pair<ManyRowsShape<kFp4>::kBytes>(widen_rows_kernel<kFp4, kNarrow>,
                                               many_rows_kernel<kFp4, kNarrow>, ready, part, units,
                                               scope, device);
    });
  };
  return run_pairs(plan, d, plan.k * kColumnBytes, kPairSlices, launch);
}

}  // namespace dgmoe
