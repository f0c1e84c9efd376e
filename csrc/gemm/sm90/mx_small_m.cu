#include "mx_small_m.cuh"

#include <atomic>

#include "mx_grouped_gemm.cuh"

namespace dgmoe {
namespace {

template <bool kFp4, bool kGranK32, int kTiles>
void launch(const MxSmallMPlan& plan, const CudaScope& scope, int device) {
  using Config = MxSmallMConfig<kFp4, kGranK32, kTiles>;
  const auto kernel = sm90_mx_small_m_kernel<kFp4, kGranK32, kTiles>;
  // The list of work takes shared memory, so that many items may cost a block.
  static std::atomic<int> residents[2][kMaxDevices] = {};
  const bool many = plan.segments() > 256;
  std::atomic<int>& known = residents[many][device];
  int resident = known.load();
  if (resident == 0) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        Config::smem_bytes(kSmallMMaxSegments)));
    STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &resident, kernel, kSmallMThreads, Config::smem_bytes(many ? kSmallMMaxSegments : 256)));
    known.store(resident);
  }
  const int64_t weight_tiles = ceil_div(plan.n, kSmallMBlockN);
  const int64_t row_tiles = ceil_div(plan.masked ? plan.m : kMxSegment, Config::kBlockM);
  const unsigned grid = grid_for(plan.segments() * weight_tiles * row_tiles, resident);
  DGMOE_LAUNCH(kernel, grid, kSmallMThreads, Config::smem_bytes(plan.segments()), scope, plan);
}

// By measurement: a tile of more rows reads weights less often, and one of fewer lets more blocks
// run.
template <bool kFp4, bool kGranK32>
void launch_for(const MxSmallMPlan& plan, const CudaScope& scope, int device, int64_t rows) {
  if (rows <= (kFp4 ? 6 : 4)) return launch<kFp4, kGranK32, 1>(plan, scope, device);
  return launch<kFp4, kGranK32, 2>(plan, scope, device);
}

}  // namespace

bool run_sm90_mx_small_m(const CudaScope& scope, const GroupedGemmPlan& plan, int device,
                         int64_t rows) {
  if (plan.k > INT32_MAX || plan.n > INT32_MAX - kSmallMBlockN) return false;
  if (plan.experts > kSmallMMaxExperts || plan.m > INT32_MAX) return false;
  const MxSmallMPlan few{mx_plan(plan)};
  if (few.segments() > kSmallMMaxSegments) return false;
  for_mx_recipe(plan, [&](auto fp4, auto gran_k32) {
    launch_for<decltype(fp4)::value, decltype(gran_k32)::value>(few, scope, device, rows);
  });
  return true;
}

}  // namespace dgmoe
