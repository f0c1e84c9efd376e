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
  const bool narrow = plan.a_gran_k == 32;
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
  ManyRowsPlan many{};
  many.a = static_cast<const uint8_t*>(plan.a);
  many.a_scale = static_cast<const int32_t*>(plan.a_scale_data);
  many.a_scale_batch = plan.a_scale.batch_stride;
  many.a_scale_row = plan.a_scale.row_stride;
  many.a_scale_word = plan.a_scale.column_stride;
  many.b = static_cast<const uint8_t*>(plan.b);
  many.b_scale = static_cast<const int32_t*>(plan.b_scale_data);
  many.b_scale_batch = plan.b_scale.batch_stride;
  many.b_scale_row = plan.b_scale.row_stride;
  many.b_scale_word = plan.b_scale.column_stride;
  many.info = plan.row_info;
  many.d = static_cast<uint16_t*>(plan.d);
  many.wide = static_cast<uint8_t*>(mutable_data_of(wide));
  many.flags = static_cast<int32_t*>(mutable_data_of(flags));
  many.m = plan.m;
  many.experts = static_cast<int32_t>(plan.experts);
  many.n = static_cast<int32_t>(plan.n);
  many.k = static_cast<int32_t>(plan.k);
  many.masked = plan.masked();
  if (plan.b_fp4) {
    launch<true, false>(many, scope, device);
  } else if (narrow) {
    launch<false, true>(many, scope, device);
  } else {
    launch<false, false>(many, scope, device);
  }
  return true;
}

}  // namespace dgmoe
