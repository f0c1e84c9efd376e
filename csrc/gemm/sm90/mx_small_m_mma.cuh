// What the grouped GEMM for few rows is made of, instruction by instruction: asynchronous copies,
// shared memory by address, and the tensor core's asynchronous products.
#pragma once

#include <cstdint>

#include "../../common/async.cuh"

namespace dgmoe {
namespace mx_small_m {

// Zeros where not there; then nothing is read.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy4(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(there ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void load_factors(float (&factors)[4], uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(factors[0]), "=f"(factors[1]), "=f"(factors[2]), "=f"(factors[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_factors(uint32_t address, float a, float b, float c,
                                              float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}
__device__ __forceinline__ void store_factor(uint32_t address, float factor) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(factor) : "memory");
}
__device__ __forceinline__ void store_words(uint32_t address, uint32_t first, uint32_t second) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second)
               : "memory");
}

// ---- the tensor core's asynchronous products ----

// 8 * kTiles rows of a group of a at an address in shared memory, unswizzled.
template <typename Shape>
__device__ __forceinline__ uint64_t describe(uint32_t address) {
  constexpr uint64_t kHalves = Shape::kCore;                       // between the two of a group
  constexpr uint64_t kEights = Shape::kGroups * 2 * Shape::kCore;  // between eights of rows
  return static_cast<uint64_t>(address >> 4 & 0x3fff) | kHalves >> 4 << 16 | kEights >> 4 << 32;
}

#define DGMOE_PRODUCT(n) "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 "
// d = a @ b^T: four values of each eight rows of b.
__device__ __forceinline__ void product(float (&d)[4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0;\n\t" DGMOE_PRODUCT(
                   8) "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1;}"
               : "=&f"(d[0]), "=&f"(d[1]), "=&f"(d[2]), "=&f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void product(float (&d)[8], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0;\n\t" DGMOE_PRODUCT(
                   16) "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1;}"
               : "=&f"(d[0]), "=&f"(d[1]), "=&f"(d[2]), "=&f"(d[3]), "=&f"(d[4]), "=&f"(d[5]),
                 "=&f"(d[6]), "=&f"(d[7])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef DGMOE_PRODUCT

// What generic accesses wrote to shared memory becomes visible to the tensor core.
__device__ __forceinline__ void publish() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace mx_small_m
}  // namespace dgmoe
