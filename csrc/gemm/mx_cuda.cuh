// What our own kernels of the MX recipes on Hopper ask before they take a product.
#pragma once

#include <type_traits>

#include "grouped_gemm_cuda.cuh"
#include "mx_product.cuh"

namespace dgmoe {

constexpr int kMaxDevices = 64;

inline bool on_16_bytes(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// The current device where it is a Hopper, else -1.
int hopper_device();

// Whether a product is one that they know: packed scales, of b for a row and 32 columns, of a for
// 32 or 128, where FP4 has 128. What is empty, or to be looked at first, is the matter of others.
bool is_mx_product(const GroupedGemmPlan& plan);

// What kernels are told of such a product. Its sizes fit.
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
