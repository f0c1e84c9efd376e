// What our own kernels of the MX recipes on Hopper have in common on the host: who takes a product,
// and what they are told of it.
#pragma once

#include <type_traits>

#include "../../common/cuda.cuh"
#include "../grouped_gemm.h"
#include "../scopes.cuh"
#include "mx_common.cuh"

namespace dgmoe {

constexpr int kMaxDevices = 64;

inline bool on_16_bytes(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// The MX recipes on Hopper: computes call.d by our own kernels, and tells whether one of them takes
// the GEMM. They need no compiling, so that they may be captured at once. What heuristics.h says
// that they need is call.workspace where the caller gave one, and else allocated.
// Throws std::invalid_argument where the workspace is too small or a scope asks for what does not
// run, std::runtime_error in an overlap.
bool run_mx_grouped_gemm(const CudaScope& scope, const char* op, const GroupedGemmCall& call);

// Multiprocessors that the scope leaves to GEMMs.
inline int64_t usable_multiprocessors() {
  const int64_t asked = gemm_settings().num_sms;
  const int64_t there = multiprocessors();
  return asked > 0 && asked < there ? asked : there;
}

// CTAs of a persistent grid over `items`, `per_sm` of which fit on a multiprocessor.
inline unsigned persistent_grid(int64_t items, int64_t per_sm) {
  const int64_t most = usable_multiprocessors() * per_sm;
  return static_cast<unsigned>(items < most ? items : most);
}

// The kernels; `choice` is of them, and `workspace` has what it says.
void run_sm90_mx_small_m(const CudaScope& scope, const GroupedGemmPlan& plan,
                         const GemmChoice& choice, int device);
void run_sm90_mx_medium_m(const CudaScope& scope, const GroupedGemmPlan& plan,
                          const GemmChoice& choice, uint8_t* workspace, int device);
void run_sm90_mx_large_m(const CudaScope& scope, const GroupedGemmPlan& plan,
                         const GemmChoice& choice, uint8_t* workspace, int device);

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
