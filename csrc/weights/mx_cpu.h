// The CPU side of mx.h: groups of a row, widened and measured.
#pragma once

#include "../common/parallel.h"
#include "mx.h"

namespace dgmoe {

// A group of 32 columns as fp32; columns past the end are zero. Returns the bits of its largest
// |x|.
DGMOE_HD uint32_t load_group(const WeightRows& weight, int64_t offset, int64_t count,
                             float (&x)[kMxGroup]) {
  const int64_t valid = count < kMxGroup ? count : kMxGroup;
  if (weight.is_bf16) {
    const uint16_t* in = static_cast<const uint16_t*>(weight.data) + offset;
    for (int64_t i = 0; i < valid; ++i) x[i] = bf16_to_float(in[i]);
  } else {
    const float* in = static_cast<const float*>(weight.data) + offset;
    for (int64_t i = 0; i < valid; ++i) x[i] = in[i];
  }
  for (int64_t i = valid; i < kMxGroup; ++i) x[i] = 0.0f;
  uint32_t amax_bits = 0;
  for (int64_t i = 0; i < kMxGroup; ++i) {
    const uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
    amax_bits = magnitude > amax_bits ? magnitude : amax_bits;
  }
  return amax_bits;
}

}  // namespace dgmoe
