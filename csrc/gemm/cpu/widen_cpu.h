// How the CPU kernels dequantise an operand: rows of bf16, e4m3 or e2m1 values times their scales,
// as fp32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../../common/layout.h"
#include "gemm_tile_cpu.h"

namespace dgmoe {

typedef uint32_t LaneBits __attribute__((vector_size(kLanes * sizeof(uint32_t))));

// Rows of e4m3 bytes or of two e2m1 codes a byte with scales, or of bf16 where `scale` is null.
struct Operand {
  const void* data;
  bool fp4;
  const void* scale;
  ScaleStrides strides;
  int64_t gran_mn, gran_k, k;
};

DGMOE_INLINE void widen_bf16(const uint16_t* __restrict__ in, int64_t count,
                             float* __restrict__ out) {
  for (int64_t i = 0; i < count; ++i) out[i] = bf16_to_float(in[i]);
}

DGMOE_INLINE void widen_e4m3(const uint8_t* __restrict__ in, int64_t count, float scale,
                             float* __restrict__ out) {
  for (int64_t i = 0; i < count; ++i) out[i] = e4m3_to_float(in[i]) * scale;
}

// Sixteen codes of eight bytes, the low nibble first: e2m1_to_float of each, all at once. Codes 0
// and 1 are fp32's 0 and 0.5, the others shift into place.
DGMOE_INLINE void widen_e2m1_lanes(const uint8_t* in, float scale, float* out) {
  static_assert(kLanes == 16);
  uint32_t words[2];
  std::memcpy(words, in, sizeof(words));
  const auto [a, b] = words;
  const LaneBits codes = LaneBits{a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b} >>
                         LaneBits{0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
  const LaneBits sign = (codes & 8u) << 28;
  const LaneBits magnitude = codes & 7u;
  const LaneBits normal = (magnitude << 22) + (126u << 23);
  const LaneBits half = -magnitude & 0x3f000000u;
  const LaneBits bits = sign | (magnitude > 1u ? normal : half);
  Lanes values;
  std::memcpy(&values, &bits, sizeof(values));
  *reinterpret_cast<LoadLanes*>(out) = values * scale;
}

// `count` is even.
DGMOE_INLINE void widen_e2m1(const uint8_t* __restrict__ in, int64_t count, float scale,
                             float* __restrict__ out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) widen_e2m1_lanes(in + i / 2, scale, out + i);
  for (; i < count; i += 2) {
    out[i] = e2m1_to_float(in[i / 2] & 15) * scale;
    out[i + 1] = e2m1_to_float(in[i / 2] >> 4) * scale;
  }
}

// Columns [begin, end) of a row as fp32. `row` counts over all experts, `batch` and `scale_row`
// find its scales.
DGMOE_INLINE void widen(const Operand& x, int64_t row, int64_t batch, int64_t scale_row,
                        int64_t begin, int64_t end, float* out) {
  const int64_t base = row * x.k;
  if (x.scale == nullptr) {
    widen_bf16(static_cast<const uint16_t*>(x.data) + base + begin, end - begin, out);
    return;
  }
  const uint8_t* bytes = static_cast<const uint8_t*>(x.data);
  const int64_t block = scale_row / x.gran_mn;
  int64_t group = begin / x.gran_k;
  int64_t group_end = (group + 1) * x.gran_k;
  for (int64_t column = begin; column < end; ++group, group_end += x.gran_k) {
    const int64_t count = std::min(end, group_end) - column;
    const float scale = load_scale(x.scale, x.strides, batch, block, group);
    if (x.fp4) {
      widen_e2m1(bytes + (base + column) / 2, count, scale, out);
    } else {
      widen_e4m3(bytes + base + column, count, scale, out);
    }
    out += count;
    column += count;
  }
}

}  // namespace dgmoe
