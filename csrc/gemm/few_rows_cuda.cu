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
  const int64_t row_tiles =
      ceil_div(plan.masked ? plan.m : FewRowsPlan::kFewRowsSegment, Shape::kRows);
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

int hopper_device() {
  // Asked once a device, and then again by racing threads, who learn the same.
  static std::atomic<int> majors[kMaxDevices] = {};
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  if (device >= kMaxDevices) return -1;
  int major = majors[device].load();
  if (major == 0) {
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    majors[device].store(major);
  }
  return major == 9 ? device : -1;
}

bool is_mx_product(const GroupedGemmPlan& plan) {
  if (plan.m == 0 || plan.n == 0 || plan.experts == 0 || plan.k == 0) return false;
  return plan.a_scale.packed() && plan.b_scale.packed() && plan.b_gran_mn == 1 &&
         plan.b_gran_k == 32 && !(plan.a_gran_k == 32 && plan.b_fp4) && !sanity_check();
}

MxPlan mx_plan(const GroupedGemmPlan& plan) {
  MxPlan mx{};
  mx.a = static_cast<const uint8_t*>(plan.a);
  mx.a_scale = static_cast<const int32_t*>(plan.a_scale_data);
  mx.a_scale_batch = plan.a_scale.batch_stride;
  mx.a_scale_row = plan.a_scale.row_stride;
  mx.a_scale_word = plan.a_scale.column_stride;
  mx.b = static_cast<const uint8_t*>(plan.b);
  mx.b_scale = static_cast<const int32_t*>(plan.b_scale_data);
  mx.b_scale_batch = plan.b_scale.batch_stride;
  mx.b_scale_row = plan.b_scale.row_stride;
  mx.b_scale_word = plan.b_scale.column_stride;
  mx.info = plan.row_info;
  mx.d = static_cast<uint16_t*>(plan.d);
  mx.m = plan.m;
  mx.experts = static_cast<int32_t>(plan.experts);
  mx.n = static_cast<int32_t>(plan.n);
  mx.k = static_cast<int32_t>(plan.k);
  mx.masked = plan.masked();
  return mx;
}

int64_t expected_rows(const GroupedGemmPlan& plan) {
  if (plan.masked()) return plan.expected_m;
  constexpr int64_t kSegment = FewRowsPlan::kFewRowsSegment;
  const int64_t segments = ceil_div(plan.m, kSegment);
  if (segments < plan.experts) return 1;
  // What is left of the segments when each expert has one. Where nothing is, they may be full or
  // nearly empty: the kernel for some rows then takes at most half as long again as the one for many
  // or a quarter as the one for few, which on full segments takes three times as long.
  const int64_t more = segments - plan.experts;
  if (more == 0) return kFewRowsMost + 1;
  return more * kSegment / plan.experts + 1;
}

bool run_few_rows(const CudaScope& scope, const GroupedGemmPlan& plan) {
  if (!is_mx_product(plan) || expected_rows(plan) > kFewRowsMost) return false;
  if (plan.k % 128 != 0 || plan.k > INT32_MAX || plan.n > INT32_MAX - kFewRowsWeights) return false;
  if (plan.experts > kFewRowsExperts || plan.m > INT32_MAX) return false;
  if (!on_16_bytes(plan.a) || !on_16_bytes(plan.b)) return false;
  const int device = hopper_device();
  if (device < 0) return false;
  const FewRowsPlan few{mx_plan(plan)};
  if (few.items() > kFewRowsItems) return false;
  const int64_t rows = expected_rows(plan);
  for_mx_recipe(plan, [&](auto fp4, auto narrow) {
    launch_for<decltype(fp4)::value, decltype(narrow)::value>(few, scope, device, rows);
  });
  return true;
}

}  // namespace dgmoe
