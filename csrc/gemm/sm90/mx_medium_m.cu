#include "mx_medium_m.cuh"

#include "mx_launch.cuh"

namespace dgmoe {

void run_sm90_mx_medium_m(const CudaScope& scope, const GroupedGemmPlan& plan,
                          const GemmChoice& choice, uint8_t* workspace, int device) {
  const auto launch = [&](const MxClusterPlan& part, int64_t m_blocks) {
    for_mx_recipe(plan, [&](auto fp4, auto gran_k32) {
      constexpr bool kFp4 = decltype(fp4)::value;
      constexpr bool kGranK32 = decltype(gran_k32)::value;
      static_assert(kMxBlockK == kMediumMBlockK);
      static_assert(medium_m_prepared_bytes(kGranK32) ==
                    kBlockM * (kMxBlockK + (kGranK32 ? 16 : 4)));
      static std::atomic<bool> ready[kMaxDevices] = {};
      launch_cluster_kernels<MxMediumMConfig<kFp4, kGranK32>::kBytes>(
          sm90_mx_medium_m_prepare_kernel<kFp4, kGranK32>, sm90_mx_medium_m_kernel<kFp4, kGranK32>,
          ready, part, m_blocks, scope, device);
    });
  };
  run_cluster_kernels(plan, choice, workspace, launch);
}

}  // namespace dgmoe
