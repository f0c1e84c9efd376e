// The CUDA group quantiser of this room: 16 consecutive columns a thread, a group in adjacent
// lanes of a warp.
#pragma once

#include "../common/cuda.cuh"

namespace dgmoe {

constexpr int kThreadColumns = 16;

struct QuantPiece {
  uint4 bytes;  // e4m3 of the thread's columns
  GroupScale scale;
};

// Four values to e4m3, the first in the low byte: the same bits as quantize(), whose rounding,
// saturation and NaN this instruction shares.
__device__ __forceinline__ uint32_t quantize4(const float* x, float multiplier) {
  uint16_t low;
  uint16_t high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(low)
      : "f"(x[1] * multiplier), "f"(x[0] * multiplier));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(high)
      : "f"(x[3] * multiplier), "f"(x[2] * multiplier));
  return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
}

__device__ __forceinline__ void load_aligned(const uint16_t* x, float* values) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const uint4 piece = reinterpret_cast<const uint4*>(x)[part];
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[part * 8 + i * 2] = bits_float(words[i] << 16);
      values[part * 8 + i * 2 + 1] = bits_float(words[i] & 0xffff0000u);
    }
  }
}

__device__ __forceinline__ void load_aligned(const float* x, float* values) {
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const float4 piece = reinterpret_cast<const float4*>(x)[part];
    values[part * 4] = piece.x;
    values[part * 4 + 1] = piece.y;
    values[part * 4 + 2] = piece.z;
    values[part * 4 + 3] = piece.w;
  }
}

__device__ __forceinline__ float to_float(uint16_t x) { return bf16_to_float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

// Quantises columns [column, column + 16) of a row of `k`; columns from k on are zero bytes. All
// lanes of the warp call it; kLanes adjacent lanes hold one group. `aligned` says that rows start
// on 16 bytes.
template <int kLanes, typename Element>
__device__ __forceinline__ QuantPiece quantize_piece(const Element* row, int64_t column, int64_t k,
                                                     bool aligned, bool power_of_two) {
  float values[kThreadColumns];
  const bool full = column + kThreadColumns <= k;
  if (full && aligned) {
    load_aligned(row + column, values);
  } else {
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i) {
      values[i] = column + i < k ? to_float(row[column + i]) : 0.0f;
    }
  }
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kThreadColumns; ++i) {
    amax = max(amax, float_bits(values[i]) & 0x7fffffffu);
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  }
  const GroupScale scale = group_scale(amax, power_of_two);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = quantize4(values + i * 4, scale.multiplier);
    if (full) continue;
    // A group with a NaN would spill it into the padding.
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      if (column + i * 4 + byte >= k) words[i] &= ~(0xffu << (8 * byte));
    }
  }
  return {make_uint4(words[0], words[1], words[2], words[3]), scale};
}

}  // namespace dgmoe
