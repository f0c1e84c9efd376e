#include "many_rows.cuh"

#include <atomic>

#include "mx_cuda.cuh"

namespace dgmoe {
namespace {

constexpr int kRows = 128;
constexpr int64_t kMostExperts = 2048;
constexpr int64_t kMostWideBytes = int64_t{8} << 30;

template <bool kFp4, bool kNarrow>
void launch(const ManyRowsPlan& plan, const CudaScope& scope, int device) {
  using Shape = ManyRowsShape<kFp4, kRows>;
  const auto multiply = many_rows_kernel<kFp4, kNarrow, kRows>;
  const auto widen = widen_rows_kernel<kFp4, kNarrow, kRows>;
  static std::atomic<bool> prepared[kMaxDevices] = {};
  if (!prepared[device].load()) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        Shape::shared_bytes(kMostExperts)));
    prepared[device].store(true);
  }
  const int64_t row_tiles = Shape::most_tiles(plan.masked, plan.experts, plan.m);
  const int64_t tiles = row_tiles * ceil_div(plan.n, kManyRowsWeights);
  DGMOE_LAUNCH(widen, grid_for(row_tiles * kManyRowsSlices, 8), kWidenThreads,
               Shape::widen_shared_bytes(plan.experts), scope, plan);
  DGMOE_LAUNCH(multiply, grid_for(tiles, 1), kManyRowsThreads, Shape::shared_bytes(plan.experts),
               scope, plan);
}

}  // namespace

bool run_many_rows(const CudaScope& scope, const GroupedGemmPlan& plan, const Tensor& d) {
  if (!is_mx_product(plan)) return false;
  if (plan.k % 128 != 0 || plan.n % 8 != 0 || plan.experts > kMostExperts) return false;
  if (!plan.masked() && plan.m % kRows != 0) return false;
  if (!on_16_bytes(plan.a) || !on_16_bytes(plan.b) || !on_16_bytes(plan.d)) return false;
  // Offsets inside of a weight, of a tile of rows, and of tiles fit in 32 bits.
  const int64_t row_tiles =
      ManyRowsShape<false, kRows>::most_tiles(plan.masked(), plan.experts, plan.m);
  const int64_t wide_bytes = row_tiles * kRows * plan.k * 2;
  const int64_t tiles = row_tiles * ceil_div(plan.n, kManyRowsWeights);
  if (plan.n * plan.k > INT32_MAX || plan.k > INT32_MAX / kRows || tiles > INT32_MAX / 2 ||
      plan.m > INT32_MAX || wide_bytes > kMostWideBytes) {
    return false;
  }
  const int device = hopper_device();
  if (device < 0) return false;
  Tensor wide = empty({wide_bytes}, ScalarType::Byte, d);
  Tensor flags = empty({row_tiles * kManyRowsSlices}, ScalarType::Int, d);
  const ManyRowsPlan many{mx_plan(plan), static_cast<uint8_t*>(mutable_data_of(wide)),
                          static_cast<int32_t*>(mutable_data_of(flags))};
  for_mx_recipe(plan, [&](auto fp4, auto narrow) {
    launch<decltype(fp4)::value, decltype(narrow)::value>(many, scope, device);
  });
  return true;
}

}  // namespace dgmoe
