// What the grouped GEMM for few rows is made of, instruction by instruction: asynchronous copies,
// shared memory by address, the tensor core's asynchronous products, and codes of FP4 and UE8M0 in
// registers.
#pragma once

#include <cstdint>

#include "../common/async.cuh"
#include "../common/numerics.h"

namespace dgmoe {
namespace few_rows {

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
// Four 8 x 16 byte matrices; a lane gives the address of a row and gets a word of each.
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ void load_factors(float (&factors)[4], uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(factors[0]), "=f"(factors[1]), "=f"(factors[2]), "=f"(factors[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ float2 load_factors(uint32_t address) {
  float2 factors;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(factors.x), "=f"(factors.y)
               : "r"(address)
               : "memory");
  return factors;
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

template <int kCount>
__device__ __forceinline__ void keep(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
__device__ __forceinline__ void keep(uint32_t (&values)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(values[i])::"memory");
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
__device__ __forceinline__ void product(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0;\n\t" DGMOE_PRODUCT(32)
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15},"
               " {%16, %17, %18, %19}, %20, p, 1, 1;}"
               : "=&f"(d[0]), "=&f"(d[1]), "=&f"(d[2]), "=&f"(d[3]), "=&f"(d[4]), "=&f"(d[5]),
                 "=&f"(d[6]), "=&f"(d[7]), "=&f"(d[8]), "=&f"(d[9]), "=&f"(d[10]), "=&f"(d[11]),
                 "=&f"(d[12]), "=&f"(d[13]), "=&f"(d[14]), "=&f"(d[15])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef DGMOE_PRODUCT

// Codes 0, 2, 4, 6 and codes 1, 3, 5, 7 of a word, as e4m3 of 2^-6 of the value.
__device__ __forceinline__ uint32_t even_codes(uint32_t word) {
  return (word << 2 & 0x1c1c1c1cu) | (word << 4 & 0x80808080u);
}
__device__ __forceinline__ uint32_t odd_codes(uint32_t word) {
  return (word >> 2 & 0x1c1c1c1cu) | (word & 0x80808080u);
}

// 2^(e - 127) of byte i of a word; NaN for byte 255.
__device__ __forceinline__ float power(uint32_t word, int i) {
  const uint32_t byte = word >> 8 * i & 255u;
  const uint32_t bits = byte == 255u ? 0x7fc00000u : byte << 23;
  return bits_float(bits > 0x00400000u ? bits : 0x00400000u);
}

// What generic accesses wrote to shared memory becomes visible to the tensor core.
__device__ __forceinline__ void publish() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace few_rows
}  // namespace dgmoe
