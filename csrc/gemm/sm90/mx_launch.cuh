// How products are launched whose kernels work in pairs of blocks.
#pragma once

#include <algorithm>
#include <atomic>

#include "mx_grouped_gemm.cuh"
#include "scheduler.cuh"

namespace dgmoe {

// Of slabs so many are multiplied at once; more go by parts, one after the other.
constexpr int64_t kMaxExpertsPerLaunch = 2048;
constexpr int64_t kMaxWorkspaceBytes = int64_t{8} << 30;

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
  DGMOE_LAUNCH(prepare, 1 + grid_for(m_blocks * kSlicesPerBlockM, 8), kPrepareThreads, first_bytes,
               scope, plan);
  const int64_t blocks = m_blocks * ceil_div(plan.n, kClusterN) * 2;
  DGMOE_LAUNCH(multiply, grid_for(blocks, 1) / 2 * 2, kCtaThreads, kBytes, scope, plan);
}

// Multiplies, given the bytes of a m_block of prepared rows and how many flags it has. `launch` is
// given a plan and its m_blocks. False where a product is none for pairs of blocks.
template <typename Launch>
bool run_cluster_kernels(const GroupedGemmPlan& plan, const Tensor& d, int64_t m_block_bytes,
                         int64_t m_block_flags, Launch launch) {
  if (plan.n % 8 != 0) return false;
  if (!plan.masked() && plan.m % kBlockM != 0) return false;
  if (!on_16_bytes(plan.d)) return false;
  // Offsets inside of a weight, of a m_block, and of tiles fit in 32 bits.
  if (plan.n * plan.k > INT32_MAX || plan.k > INT32_MAX / kBlockM || plan.m > INT32_MAX) {
    return false;
  }
  const int64_t max_m_blocks =
      std::min(kMaxWorkspaceBytes / m_block_bytes, INT32_MAX / 2 / ceil_div(plan.n, kClusterN));
  const int64_t batch_m_blocks = ceil_div(plan.m, kBlockM);  // of a slab, or all segments
  if (batch_m_blocks > max_m_blocks) return false;
  const int64_t batches = plan.masked() ? plan.experts : 1;
  const int64_t parts =
      ceil_div(batches, std::min(kMaxExpertsPerLaunch, max_m_blocks / batch_m_blocks));
  const int64_t at_once = ceil_div(batches, parts);
  const int64_t m_blocks = at_once * batch_m_blocks;
  const char* const op =
      plan.masked() ? "grouped_gemm_nt_f8f8bf16_masked" : "grouped_gemm_nt_f8f8bf16_contig";
  Tensor rows = empty(op, "workspace of rows", {m_blocks * m_block_bytes}, ScalarType::Byte, d);
  Tensor flags = empty(op, "workspace of flags", {m_blocks * m_block_flags}, ScalarType::Int, d);
  Tensor tiles = empty(op, "workspace of tiles", {(m_blocks + 1) * 4}, ScalarType::Int, d);
  const MxClusterPlan whole{mx_plan(plan), static_cast<uint8_t*>(mutable_data_of(rows)),
                            static_cast<int32_t*>(mutable_data_of(flags)),
                            static_cast<int4*>(mutable_data_of(tiles))};
  if (!plan.masked()) {
    launch(whole, m_blocks);
    return true;
  }
  for (int64_t first = 0; first < batches; first += at_once) {
    const int64_t experts = std::min(at_once, batches - first);
    launch(plan_of_experts(whole, plan.b_fp4, first, experts), experts * batch_m_blocks);
  }
  return true;
}

}  // namespace dgmoe
