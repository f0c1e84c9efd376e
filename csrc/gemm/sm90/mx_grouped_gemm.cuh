// What our own kernels of the MX recipes on Hopper have in common on the host: who takes a product,
// and what they are told of it.
#pragma once

#include <type_traits>

#include "../../common/cuda.cuh"
#include "../grouped_gemm.h"
#include "mx_common.cuh"

namespace dgmoe {

constexpr int kMaxDevices = 64;

inline bool on_16_bytes(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// The MX recipes on Hopper: computes d by our own kernels, and tells whether one of them takes the
// product. They need no compiling, so that they may be captured at once. Allocates where `d` is, 8
// GiB at most.
bool run_mx_grouped_gemm(const CudaScope& scope, const GroupedGemmPlan& plan, const Tensor& d);

// run_mx_grouped_gemm asks one of these for d, and each tells whether it took the product:
// mx_small_m.cu first, where an expert has at most so many rows, given how many it is expected to
// have.
constexpr int64_t kSmallMMaxRows = 14;
bool run_sm90_mx_small_m(const CudaScope& scope, const GroupedGemmPlan& plan, int device,
                         int64_t rows);
// Then mx_medium_m.cu, where it has at most so many. Allocates a's rows once more, 8 GiB at most;
// false where a slab or all segments take more.
constexpr int64_t kMediumMMaxRows = 72;
bool run_sm90_mx_medium_m(const CudaScope& scope, const GroupedGemmPlan& plan, const Tensor& d,
                          int device);
// Else mx_large_m.cu: the same, with a's rows as bf16.
bool run_sm90_mx_large_m(const CudaScope& scope, const GroupedGemmPlan& plan, const Tensor& d,
                         int device);

// What kernels are told of a product whose sizes fit.
MxPlan mx_plan(const GroupedGemmPlan& plan);

// Calls with whether b is FP4 and whether a has scales of 32 columns, as types.
template <typename Call>
void for_mx_recipe(const GroupedGemmPlan& plan, Call call) {
  if (plan.b_fp4) {
    call(std::true_type{}, std::false_type{});
  } else if (plan.a_gran_k == 32) {
    call(std::false_type{}, std::true_type{});
  } else {
    call(std::false_type{}, std::false_type{});
  }
}

}  // namespace dgmoe
