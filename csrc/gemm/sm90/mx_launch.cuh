// How products are launched whose kernels work in pairs of blocks.
#pragma once

#include <algorithm>
#include <atomic>

#include "mx_grouped_gemm.cuh"
#include "scheduler.cuh"

namespace dgmoe {

static_assert(kMxBlockM == kBlockM && kMxClusterN == kClusterN);
static_assert(kMxFlagsPerBlockM == kSlicesPerBlockM && kMxTileBytes == sizeof(int4));

// Of slabs, those of some experts.
inline MxClusterPlan plan_of_experts(const MxClusterPlan& whole, bool fp4, int64_t first,
                                     int64_t experts) {
  MxClusterPlan part = whole;
  const int64_t row = first * whole.m;
  part.a += row * whole.k;
  part.a_scale += first * whole.a_scale_batch;
  part.b += first * whole.n * (fp4 ? whole.k / 2 : whole.k);
  part.b_scale += first * whole.b_scale_batch;
  part.info += first;
  part.d += row * whole.n;
  part.experts = static_cast<int32_t>(experts);
  return part;
}

// Launches both kernels, of which the second takes kBytes of shared memory.
template <int kBytes, typename Kernel>
void launch_cluster_kernels(Kernel prepare, Kernel multiply,
                            std::atomic<bool> (&ready)[kMaxDevices], const MxClusterPlan& plan,
                            int64_t m_blocks, const CudaScope& scope, int device) {
  if (!ready[device].load()) {
    STD_CUDA_CHECK(
        cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    ready[device].store(true);
  }
  const int first_bytes = plan.masked ? (plan.experts + 1) * sizeof(int32_t) : 0;
  DGMOE_LAUNCH(prepare, 1 + persistent_grid(m_blocks * kSlicesPerBlockM, 8), kPrepareThreads,
               first_bytes, scope, plan);
  const int64_t blocks = m_blocks * ceil_div(plan.n, kClusterN) * 2;
  // Whole clusters of two CTAs, and at least one.
  const unsigned grid = std::max(2u, persistent_grid(blocks, 1) / 2 * 2);
  DGMOE_LAUNCH(multiply, grid, kCtaThreads, kBytes, scope, plan);
}

// Multiplies, slabs in parts where they are many. `launch` is given a plan and its M blocks.
template <typename Launch>
void run_cluster_kernels(const GroupedGemmPlan& plan, const GemmChoice& choice, uint8_t* workspace,
                         Launch launch) {
  const int64_t tiles = choice.rows_bytes + choice.flags_bytes;
  const MxClusterPlan whole{mx_plan(plan), workspace,
                            reinterpret_cast<int32_t*>(workspace + choice.rows_bytes),
                            reinterpret_cast<int4*>(workspace + tiles)};
  if (!plan.masked()) {
    launch(whole, choice.m_blocks);
    return;
  }
  for (int64_t first = 0; first < plan.experts; first += choice.experts_per_launch) {
    const int64_t experts = std::min(choice.experts_per_launch, plan.experts - first);
    launch(plan_of_experts(whole, plan.b_fp4, first, experts),
           experts * ceil_div(plan.m, kMxBlockM));
  }
}

}  // namespace dgmoe
