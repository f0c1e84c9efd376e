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

// Whether the operands are such as our kernels read; what is to be looked at first is not.
bool takes_operands(const GroupedGemmPlan& plan) {
  return plan.a_scale.packed() && plan.b_scale.packed() && on_16_bytes(plan.a) &&
         on_16_bytes(plan.b) && on_16_bytes(plan.d) && !sanity_check();
}

// As `check` in dgmoe_ops/backends/scopes.py, which has the words.
void check_scopes(const Check& check, const char* op, const GroupedGemmSpec& spec) {
  const GemmSettings& settings = gemm_settings();
  const bool aligned = settings.alignment == 0 || settings.alignment == kMxBlockM;
  check.that(spec.masked() || aligned, "alignment", "be one of 128 on SM90", settings.alignment);
  if (settings.num_sms > 0) {
    const int64_t most = multiprocessors();
    check.that(settings.num_sms <= most, "num_sms",
               "be at most " + std::to_string(most) + ", the multiprocessors of the device",
               settings.num_sms);
  }
  if (settings.overlap) {
    throw std::runtime_error(
        std::string("dgmoe::") + op +
        ": overlap of the down GEMM is not available: this GEMM on SM90 would never signal; leave"
        " down_gemm_overlap for it");
  }
}

const char* name_of(GemmKernel kernel) {
  return kernel == GemmKernel::kSm90MxMediumM ? "sm90_mx_medium_m" : "sm90_mx_large_m";
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

bool run_mx_grouped_gemm(const CudaScope& scope, const char* op, const GroupedGemmCall& call) {
  const GroupedGemmPlan& plan = call.plan;
  if (!is_mx(plan)) return false;
  const int device = hopper_device();
  if (device < 0) return false;
  const GemmChoice choice = choose_gemm(plan, 90);
  if (choice.kernel == GemmKernel::kNone) return false;
  const Check check(op);
  check_scopes(check, op, plan);
  if (choice.kernel == GemmKernel::kTriton || !takes_operands(plan)) return false;
  if (choice.kernel == GemmKernel::kSm90MxSmallM) {
    run_sm90_mx_small_m(scope, plan, choice, device);
    return true;
  }
  const int64_t bytes = choice.workspace_bytes();
  if (call.workspace.has_value()) {
    check.that(call.workspace->numel() >= bytes, "workspace",
               "have at least " + std::to_string(bytes) + " bytes for " + name_of(choice.kernel),
               call.workspace->numel());
  }
  // Freed at the end: the allocator lends it to later work of this stream only.
  Tensor workspace = call.workspace.has_value()
                         ? *call.workspace
                         : empty(op, "workspace", {bytes}, ScalarType::Byte, call.d);
  uint8_t* const data = static_cast<uint8_t*>(mutable_data_of(workspace));
  const auto run =
      choice.kernel == GemmKernel::kSm90MxMediumM ? run_sm90_mx_medium_m : run_sm90_mx_large_m;
  run(scope, plan, choice, data, device);
  return true;
}

}  // namespace dgmoe
