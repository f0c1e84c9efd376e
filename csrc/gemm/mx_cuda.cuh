// What our own kernels of the MX recipes on Hopper ask before they take a product.
#pragma once

#include "grouped_gemm_cuda.cuh"

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

}  // namespace dgmoe
