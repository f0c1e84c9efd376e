// What both kernels of the MX recipes on Hopper are given, and how both order the tensor core's
// asynchronous products.
#pragma once

#include "../common/async.cuh"
#include "../common/layout.h"

namespace dgmoe {

struct MxPlan {
  const uint8_t* a;  // e4m3
  const int32_t* a_scale;
  int64_t a_scale_batch, a_scale_row, a_scale_word;  // strides, in words
  const uint8_t* b;                                  // e4m3, or two e2m1 codes a byte
  const int32_t* b_scale;
  int64_t b_scale_batch, b_scale_row, b_scale_word;
  const int32_t* info;  // masked_m or m_indices
  uint16_t* d;
  int64_t m;
  int32_t experts, n, k;
  bool masked;
};

// Registers that products read or write are as they should be.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kGroups of the committed groups are under way.
template <int kGroups>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

}  // namespace dgmoe
