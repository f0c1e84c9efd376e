// What the kernels of the MX recipes on Hopper are given, how they read shared memory by address, how
// they order the tensor core's asynchronous products, and codes of FP4 and UE8M0 in registers.
#pragma once

#include "../../common/async.cuh"
#include "../../common/layout.h"
#include "../../common/numerics.h"

namespace dgmoe {

constexpr int kMxSegment = 128;  // rows of a segment of the contiguous layout

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

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ float2 load_pair(uint32_t address) {
  float2 factors;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(factors.x), "=f"(factors.y)
               : "r"(address)
               : "memory");
  return factors;
}
// Four 8 x 16 byte matrices; a lane gives the address of a row and gets a word of each.
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
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

// Registers of products that were waited for are not touched before.
template <int kCount>
__device__ __forceinline__ void keep(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
__device__ __forceinline__ void keep(uint32_t (&values)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// Codes 0, 2, 4, 6 and codes 1, 3, 5, 7 of a word, as e4m3 of 2^-6 of the value.
__device__ __forceinline__ uint32_t even_codes(uint32_t word) {
  return (word << 2 & 0x1c1c1c1cu) | (word << 4 & 0x80808080u);
}
__device__ __forceinline__ uint32_t odd_codes(uint32_t word) {
  return (word >> 2 & 0x1c1c1c1cu) | (word & 0x80808080u);
}
// The left operand of a group, of rows r and r + 8 of a lane: their eight codes each.
__device__ __forceinline__ void unpack(uint32_t (&left)[4], uint32_t codes, uint32_t codes_below) {
  left[0] = even_codes(codes), left[1] = even_codes(codes_below);
  left[2] = odd_codes(codes), left[3] = odd_codes(codes_below);
}

// 2^(e - 127) of byte i of a word; NaN for byte 255.
__device__ __forceinline__ float power(uint32_t word, int i) {
  const uint32_t byte = word >> 8 * i & 255u;
  const uint32_t bits = byte == 255u ? 0x7fc00000u : byte << 23;
  return bits_float(bits > 0x00400000u ? bits : 0x00400000u);
}

}  // namespace dgmoe
