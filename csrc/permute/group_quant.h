// The CPU row quantiser of this room: one row of bf16 or fp32 to e4m3 and its group scales.
#pragma once

#include <cstring>

#include "../common/layout.h"
#include "../common/parallel.h"

namespace dgmoe {

struct QuantRow {
  const void* x;
  bool is_bf16;
  int64_t k, padded_k, group_size;
  bool power_of_two;
};

constexpr int64_t kMaxGroupSize = 128;

// Writes the bytes of the row to `q` and its scales to row `row` of slab `batch`.
DGMOE_CPU_CLONES
static void quantize_row(const QuantRow& in, uint8_t* q, void* scale, const ScaleStrides& strides,
                         int64_t batch, int64_t row) {
  float values[kMaxGroupSize];
  uint8_t bytes[kMaxGroupSize];
  for (int64_t group = 0; group < strides.groups; ++group) {
    const int64_t begin = group * in.group_size;
    const int64_t left = in.padded_k - begin;
    const int64_t columns = left < in.group_size ? left : in.group_size;
    const int64_t real = in.k - begin;
    const int64_t valid = real < 0 ? 0 : real < columns ? real : columns;
    if (in.is_bf16) {
      const uint16_t* x = static_cast<const uint16_t*>(in.x) + begin;
      for (int64_t i = 0; i < valid; ++i) values[i] = bf16_to_float(x[i]);
    } else {
      const float* x = static_cast<const float*>(in.x) + begin;
      for (int64_t i = 0; i < valid; ++i) values[i] = x[i];
    }
    uint32_t amax = 0;
    for (int64_t i = 0; i < valid; ++i) {
      const uint32_t magnitude = float_bits(values[i]) & 0x7fffffffu;
      amax = magnitude > amax ? magnitude : amax;
    }
    const GroupScale group_scales = group_scale(amax, in.power_of_two);
    const float multiplier = group_scales.multiplier;
    for (int64_t i = 0; i < valid; ++i) bytes[i] = quantize(values[i], multiplier);
    // Not by quantising zeros: a group with a NaN would spill it into the padding.
    std::memcpy(q + begin, bytes, static_cast<size_t>(valid));
    std::memset(q + begin + valid, 0, static_cast<size_t>(columns - valid));
    store_scale(scale, strides, batch, row, group, group_scales);
  }
}

// Copies the scales of one row to another place of the same tensor.
inline void copy_scale_row(void* scale, const ScaleStrides& strides, int64_t from_batch,
                           int64_t from_row, int64_t to_batch, int64_t to_row) {
  uint32_t* words = static_cast<uint32_t*>(scale);
  for (int64_t column = 0; column < strides.columns(); ++column) {
    words[strides.at(to_batch, to_row, column)] = words[strides.at(from_batch, from_row, column)];
  }
}

}  // namespace dgmoe
