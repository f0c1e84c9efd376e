// What the SM90 kernels of the MX recipes share: what they are told of a grouped GEMM, and codes of
// FP4 and UE8M0 in registers.
//
// d[m, n] = a[m, k] @ b[n, k]^T with b the weight of a row's expert. The operands are swapped for
// the tensor core: rows of the weight are wgmma's M, rows of a its N, so that small M costs no
// padding to 64 rows and the weight comes from registers, where it can be unpacked.
#pragma once

#include "../../common/layout.h"
#include "../../common/numerics.h"
#include "../../common/sm90.cuh"
#include "wgmma.cuh"

namespace dgmoe {

constexpr int kMxSegment = 128;  // rows of a segment of the contiguous layout

struct MxPlan {
  const uint8_t* a;  // e4m3
  const int32_t* a_scale;
  int64_t a_scale_batch, a_scale_row, a_scale_word;  // strides, in words of four UE8M0 codes
  const uint8_t* b;                                  // e4m3, or two e2m1 codes a byte
  const int32_t* b_scale;
  int64_t b_scale_batch, b_scale_row, b_scale_word;
  const int32_t* info;  // masked_m or m_indices
  uint16_t* d;          // bf16
  int64_t m;
  int32_t experts, n, k;
  bool masked;
};

namespace sm90 {

// Valid rows of a slab whose masked_m is `count`.
__device__ __forceinline__ int64_t valid_rows(const MxPlan& p, int64_t count) {
  return count < 0 ? 0 : count < p.m ? count : p.m;
}

// Codes 0, 2, 4, 6 and codes 1, 3, 5, 7 of a word, as e4m3 of 2^-6 of the value: an e2m1 code
// shifted into the bits of an e4m3 value is just that, zero and one half included.
__device__ __forceinline__ uint32_t even_e2m1_to_e4m3(uint32_t word) {
  return (word << 2 & 0x1c1c1c1cu) | (word << 4 & 0x80808080u);
}
__device__ __forceinline__ uint32_t odd_e2m1_to_e4m3(uint32_t word) {
  return (word >> 2 & 0x1c1c1c1cu) | (word & 0x80808080u);
}
// A lane's fragment of wgmma's A operand for a group of 32 columns: its eight codes of row r and of
// row r + 8. Even codes fill one register and odd ones another; the other operand's columns are
// permuted likewise, since the order of columns within a group is free.
__device__ __forceinline__ void e2m1_fragment(uint32_t (&fragment)[4], uint32_t row,
                                              uint32_t row_8) {
  fragment[0] = even_e2m1_to_e4m3(row), fragment[1] = even_e2m1_to_e4m3(row_8);
  fragment[2] = odd_e2m1_to_e4m3(row), fragment[3] = odd_e2m1_to_e4m3(row_8);
}

// UE8M0 code i of a word, as float: 2^(code - 127); NaN for 255.
__device__ __forceinline__ float ue8m0_of_word(uint32_t word, int i) {
  const uint32_t code = word >> 8 * i & 255u;
  const uint32_t bits = code == 255u ? 0x7fc00000u : code << 23;
  return bits_float(bits > 0x00400000u ? bits : 0x00400000u);
}

}  // namespace sm90
}  // namespace dgmoe
