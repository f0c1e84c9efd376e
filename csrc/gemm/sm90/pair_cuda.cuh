// How products are launched whose kernels work in pairs of blocks.
#pragma once

#include <algorithm>
#include <atomic>

#include "mx_cuda.cuh"
#include "pair_tiles.cuh"

namespace dgmoe {

// Of slabs so many are multiplied at once; more go by parts, one after the other.
constexpr int64_t kPairMostExperts = 2048;
constexpr int64_t kPairMostBytes = int64_t{8} << 30;

// Of slabs, those of some experts.
inline PairPlan pair_part(const PairPlan& whole, bool fp4, int64_t first, int64_t experts) {
  PairPlan part = whole;
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
void launch_pair(Kernel prepare, Kernel multiply, std::atomic<bool> (&ready)[kMaxDevices],
                 const PairPlan& plan, int64_t units, const CudaScope& scope, int device) {
  if (!ready[device].load()) {
    STD_CUDA_CHECK(
        cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    ready[device].store(true);
  }
  const int first_bytes = plan.masked ? (plan.experts + 1) * sizeof(int32_t) : 0;
  DGMOE_LAUNCH(prepare, 1 + grid_for(units * kPairSlices, 8), kPrepareThreads, first_bytes, scope,
               plan);
  const int64_t blocks = units * ceil_div(plan.n, kPairWeights) * 2;
  DGMOE_LAUNCH(multiply, grid_for(blocks, 1) / 2 * 2, kPairThreads, kBytes, scope, plan);
}

// Multiplies, given the bytes of a unit of prepared rows and how many flags it has. `launch` is given
// a plan and its units. False where a product is none for pairs of blocks.
template <typename Launch>
bool run_pairs(const GroupedGemmPlan& plan, const Tensor& d, int64_t unit_bytes, int64_t unit_flags,
               Launch launch) {
  if (plan.n % 8 != 0) return false;
  if (!plan.masked() && plan.m % kPairUnit != 0) return false;
  if (!on_16_bytes(plan.d)) return false;
  // Offsets inside of a weight, of a unit, and of tiles fit in 32 bits.
  if (plan.n * plan.k > INT32_MAX || plan.k > INT32_MAX / kPairUnit || plan.m > INT32_MAX) {
    return false;
  }
  const int64_t most_units =
      std::min(kPairMostBytes / unit_bytes, INT32_MAX / 2 / ceil_div(plan.n, kPairWeights));
  const int64_t batch_units = ceil_div(plan.m, kPairUnit);  // of a slab, or all segments
  if (batch_units > most_units) return false;
  const int64_t batches = plan.masked() ? plan.experts : 1;
  const int64_t parts = ceil_div(batches, std::min(kPairMostExperts, most_units / batch_units));
  const int64_t at_once = ceil_div(batches, parts);
  const int64_t units = at_once * batch_units;
  Tensor rows = empty({units * unit_bytes}, ScalarType::Byte, d);
  Tensor flags = empty({units * unit_flags}, ScalarType::Int, d);
  Tensor tiles = empty({(units + 1) * 4}, ScalarType::Int, d);
  const PairPlan whole{mx_plan(plan), static_cast<uint8_t*>(mutable_data_of(rows)),
                       static_cast<int32_t*>(mutable_data_of(flags)),
                       static_cast<int4*>(mutable_data_of(tiles))};
  if (!plan.masked()) {
    launch(whole, units);
    return true;
  }
  for (int64_t first = 0; first < batches; first += at_once) {
    const int64_t experts = std::min(at_once, batches - first);
    launch(pair_part(whole, plan.b_fp4, first, experts), experts * batch_units);
  }
  return true;
}

}  // namespace dgmoe
