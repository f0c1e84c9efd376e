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
  const unsigned grid = persistent_grid(plan.segments() * weight_tiles * row_tiles, resident);
  DGMOE_LAUNCH(kernel, grid, kSmallMThreads, Config::smem_bytes(plan.segments()), scope, plan);
}

}  // namespace

void run_sm90_mx_small_m(const CudaScope& scope, const GroupedGemmPlan& plan,
                         const GemmChoice& choice, int device) {
  static_assert(kSmallMMaxSlabsOrSegments == kSmallMMaxSegments);
  static_assert(kSmallMMaxLocalExperts == kSmallMMaxExperts && kSmallMWeightRows == kSmallMBlockN);
  const MxSmallMPlan small{mx_plan(plan)};
  for_mx_recipe(plan, [&](auto fp4, auto gran_k32) {
    constexpr bool kFp4 = decltype(fp4)::value;
    constexpr bool kGranK32 = decltype(gran_k32)::value;
    const auto run = choice.block_m == 8 ? launch<kFp4, kGranK32, 1> : launch<kFp4, kGranK32, 2>;
    run(small, scope, device);
  });
}

}  // namespace dgmoe
