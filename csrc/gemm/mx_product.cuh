// What both kernels of the MX recipes on Hopper are given, how both read shared memory by address,
// and how both order the tensor core's asynchronous products.
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

// Valid rows of a slab, by its count.
__device__ __forceinline__ int64_t valid_rows(const MxPlan& p, int64_t count) {
  return count < 0 ? 0 : count < p.m ? count : p.m;
}

__device__ __forceinline__ void load_words(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

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
