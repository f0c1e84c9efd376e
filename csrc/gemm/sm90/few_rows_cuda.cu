#include "few_rows.cuh"

#include <atomic>

#include "mx_cuda.cuh"

namespace dgmoe {
namespace {

template <bool kFp4, bool kNarrow, int kTiles>
void launch(const FewRowsPlan& plan, const CudaScope& scope, int device) {
  using Shape = FewRowsShape<kFp4, kNarrow, kTiles>;
  const auto kernel = few_rows_kernel<kFp4, kNarrow, kTiles>;
  // The list of work takes shared memory, so that many items may cost a block.
  static std::atomic<int> residents[2][kMaxDevices] = {};
  const bool many = plan.items() > 256;
  std::atomic<int>& known = residents[many][device];
  int resident = known.load();
  if (resident == 0) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        Shape::shared_bytes(kFewRowsItems)));
    STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &resident, kernel, kFewRowsThreads, Shape::shared_bytes(many ? kFewRowsItems : 256)));
    known.store(resident);
  }
  const int64_t weight_tiles = ceil_div(plan.n, kFewRowsWeights);
  const int64_t row_tiles = ceil_div(plan.masked ? plan.m : kMxSegment, Shape::kRows);
  const unsigned grid = grid_for(plan.items() * weight_tiles * row_tiles, resident);
  DGMOE_LAUNCH(kernel, grid, kFewRowsThreads, Shape::shared_bytes(plan.items()), scope, plan);
}

// By measurement: a tile of more rows reads weights less often, and one of fewer lets more blocks
// run.
template <bool kFp4, bool kNarrow>
void launch_for(const FewRowsPlan& plan, const CudaScope& scope, int device, int64_t rows) {
  if (rows <= (kFp4 ? 6 : 4)) return launch<kFp4, kNarrow, 1>(plan, scope, device);
  return launch<kFp4, kNarrow, 2>(plan, scope, device);
}

}  // namespace

bool run_few_rows(const CudaScope& scope, const GroupedGemmPlan& plan, int device, int64_t rows) {
  if (plan.k > INT32_MAX || plan.n > INT32_MAX - kFewRowsWeights) return false;
  if (plan.experts > kFewRowsExperts || plan.m > INT32_MAX) return false;
  const FewRowsPlan few{mx_plan(plan)};
  if (few.items() > kFewRowsItems) return false;
  for_mx_recipe(plan, [&](auto fp4, auto narrow) {
    launch_for<decltype(fp4)::value, decltype(narrow)::value>(few, scope, device, rows);
  });
  return true;
}

}  // namespace dgmoe
