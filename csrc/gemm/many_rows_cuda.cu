#include "many_rows.cuh"

#include <algorithm>
#include <atomic>

#include "mx_cuda.cuh"

namespace dgmoe {
namespace {

// Of slabs so many are multiplied at once; more go by parts, one after the other.
constexpr int64_t kMostExperts = 2048;
constexpr int64_t kMostWideBytes = int64_t{8} << 30;

template <bool kFp4, bool kNarrow>
void launch(const ManyRowsPlan& plan, int64_t units, const CudaScope& scope, int device) {
  constexpr int kBytes = ManyRowsShape<kFp4>::kBytes;
  const auto multiply = many_rows_kernel<kFp4, kNarrow>;
  const auto widen = widen_rows_kernel<kFp4, kNarrow>;
  static std::atomic<bool> prepared[kMaxDevices] = {};
  if (!prepared[device].load()) {
    STD_CUDA_CHECK(
        cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    prepared[device].store(true);
  }
  const int first_bytes = plan.masked ? (plan.experts + 1) * sizeof(int32_t) : 0;
  DGMOE_LAUNCH(widen, 1 + grid_for(units * kManyRowsSlices, 8), kWidenThreads, first_bytes, scope,
               plan);
  const int64_t blocks = units * ceil_div(plan.n, kManyRowsWeights) * 2;
  DGMOE_LAUNCH(multiply, grid_for(blocks, 1) / 2 * 2, kManyRowsThreads, kBytes, scope, plan);
}

// Of slabs, those of some experts.
template <bool kFp4>
ManyRowsPlan part_of(const ManyRowsPlan& whole, int64_t first, int64_t experts) {
  ManyRowsPlan part = whole;
  const int64_t row = first * whole.m;
  part.a += row * whole.k;
  part.a_scale += first * whole.a_scale_batch;
  part.b += first * whole.n * (kFp4 ? whole.k / 2 : whole.k);
  part.b_scale += first * whole.b_scale_batch;
  part.info += first;
  part.d += row * whole.n;
  part.experts = static_cast<int32_t>(experts);
  return part;
}

}  // namespace

bool run_many_rows(const CudaScope& scope, const GroupedGemmPlan& plan, const Tensor& d) {
  if (!is_mx_product(plan)) return false;
  if (plan.k % 128 != 0 || plan.n % 8 != 0) return false;
  if (!plan.masked() && plan.m % kManyRowsUnit != 0) return false;
  if (!on_16_bytes(plan.a) || !on_16_bytes(plan.b) || !on_16_bytes(plan.d)) return false;
  // Offsets inside of a weight, of a unit, and of tiles fit in 32 bits.
  if (plan.n * plan.k > INT32_MAX || plan.k > INT32_MAX / kManyRowsUnit || plan.m > INT32_MAX) {
    return false;
  }
  const int64_t unit_bytes = kManyRowsUnit * plan.k * 2;
  const int64_t most_units =
      std::min(kMostWideBytes / unit_bytes, INT32_MAX / 2 / ceil_div(plan.n, kManyRowsWeights));
  const int64_t batch_units = ceil_div(plan.m, kManyRowsUnit);  // of a slab, or all segments
  if (batch_units > most_units) return false;
  const int device = hopper_device();
  if (device < 0) return false;
  const int64_t batches = plan.masked() ? plan.experts : 1;
  const int64_t parts = ceil_div(batches, std::min(kMostExperts, most_units / batch_units));
  const int64_t at_once = ceil_div(batches, parts);
  const int64_t units = at_once * batch_units;
  Tensor wide = empty({units * unit_bytes}, ScalarType::Byte, d);
  Tensor flags = empty({units * kManyRowsSlices}, ScalarType::Int, d);
  Tensor tiles = empty({(units + 1) * 4}, ScalarType::Int, d);
  const ManyRowsPlan whole{mx_plan(plan), static_cast<uint8_t*>(mutable_data_of(wide)),
                           static_cast<int32_t*>(mutable_data_of(flags)),
                           static_cast<int4*>(mutable_data_of(tiles))};
  for_mx_recipe(plan, [&](auto fp4, auto narrow) {
    constexpr bool kFp4 = decltype(fp4)::value;
    constexpr bool kNarrow = decltype(narrow)::value;
    if (!plan.masked()) return launch<kFp4, kNarrow>(whole, units, scope, device);
    for (int64_t first = 0; first < batches; first += at_once) {
      const int64_t experts = std::min(at_once, batches - first);
      launch<kFp4, kNarrow>(part_of<kFp4>(whole, first, experts), experts * batch_units, scope,
                            device);
    }
  });
  return true;
}

}  // namespace dgmoe
