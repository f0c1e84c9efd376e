#include "mx_common.cuh"

#include <atomic>

#include "mx_grouped_gemm.cuh"

namespace dgmoe {
namespace {

// The current device where it is a Hopper, else -1.
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

// Whether a product is one that our kernels know: packed scales, of b for a row and 32 columns, of
// a for 32 or 128, where FP4 has 128; whole words of scales. What is empty, or to be looked at
// first, is the matter of others.
bool is_mx_grouped_gemm(const GroupedGemmPlan& plan) {
  if (plan.m == 0 || plan.n == 0 || plan.experts == 0 || plan.k == 0) return false;
  return plan.a_scale.packed() && plan.b_scale.packed() && plan.b_gran_mn == 1 &&
         plan.b_gran_k == 32 && !(plan.a_gran_k == 32 && plan.b_fp4) && plan.k % 128 == 0 &&
         on_16_bytes(plan.a) && on_16_bytes(plan.b) && !sanity_check();
}

// Rows of an expert, by what is known without the device.
int64_t expected_rows(const GroupedGemmPlan& plan) {
  if (plan.masked()) return plan.expected_m;
  constexpr int64_t kSegment = kMxSegment;
  const int64_t segments = ceil_div(plan.m, kSegment);
  if (segments < plan.experts) return 1;
  // What is left of the segments when each expert has one. Where nothing is, they may be full or
  // nearly empty: the kernel for some rows then takes at most half as long again as the one for
  // many or a quarter as the one for few, which on full segments takes three times as long.
  const int64_t more = segments - plan.experts;
  if (more == 0) return kSmallMMaxRows + 1;
  return more * kSegment / plan.experts + 1;
}

}  // namespace

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

bool run_mx_grouped_gemm(const CudaScope& scope, const GroupedGemmPlan& plan, const Tensor& d) {
  if (!is_mx_grouped_gemm(plan)) return false;
  const int device = hopper_device();
  if (device < 0) return false;
  const int64_t rows = expected_rows(plan);
  if (rows <= kSmallMMaxRows && run_sm90_mx_small_m(scope, plan, device, rows)) return true;
  return rows <= kMediumMMaxRows ? run_sm90_mx_medium_m(scope, plan, d, device)
                                 : run_sm90_mx_large_m(scope, plan, d, device);
}

}  // namespace dgmoe
