// How a CUDA thread of the gated activations loads its columns ahead of use, converts them to fp32,
// adds a bias and computes products. A span of 128 columns has eight threads, each with eight
// columns of either half, so that accesses of a span are coalesced.
#pragma once

#include "../common/cuda.cuh"
#include "gated.h"

namespace dgmoe {

constexpr int kGatedLanes = 8;    // threads of a span
constexpr int kGatedColumns = 8;  // columns a thread has of each half of a span
constexpr int kGatedHalf = kGatedLanes * kGatedColumns;
constexpr int kGatedSpan = 2 * kGatedHalf;

// Cases that a kernel is compiled for; simpler ones use fewer registers.
enum class GatedCase {
  kPlain,  // rows of whole vectors
  kBias,   // the same with a bias
  kAny,
};

// A half's gates and ups as loaded, bf16.
struct GatedRaw {
  uint4 low, high;
};

// Evict first: it is read once.
__device__ __forceinline__ uint4 stream16(const uint16_t* in) {
  return __ldcs(reinterpret_cast<const uint4*>(in));
}

__device__ __forceinline__ uint32_t element_or_zero(const uint16_t* in, int64_t i, bool there) {
  return there ? in[i] : 0u;
}

// Element by element, gates first whatever gate_up_interleave is.
static __device__ __noinline__ GatedRaw load_elements(const uint16_t* row, int32_t inter,
                                                      int32_t gate_up_interleave, int32_t column) {
  const int64_t stride = gate_up_interleave == 0 ? 1 : 2;
  const int64_t up = gate_up_interleave == 0 ? inter : 1;
  uint32_t words[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = static_cast<int64_t>(column) + 2 * i;
    const bool one = at < inter;
    const bool two = at + 1 < inter;
    words[i] = element_or_zero(row, at * stride, one) | element_or_zero(row, (at + 1) * stride, two)
                                                            << 16;
    words[4 + i] = element_or_zero(row, at * stride + up, one) |
                   element_or_zero(row, (at + 1) * stride + up, two) << 16;
  }
  return {make_uint4(words[0], words[1], words[2], words[3]),
          make_uint4(words[4], words[5], words[6], words[7])};
}

// Whether a thread's columns are whole vectors.
template <GatedCase kCase>
__device__ __forceinline__ bool in_vectors(const GatedPlan& in) {
  return kCase != GatedCase::kAny || in.inter % kGatedColumns == 0;
}

// The addresses of the vectors of a half from `column` on.
struct GatedVectors {
  const uint16_t *low, *high;

  __device__ __forceinline__ GatedVectors(const GatedPlan& in, const uint16_t* row, int32_t column)
      : low(row + (in.gate_up_interleave != 0 ? 2 * static_cast<int64_t>(column) : column)),
        high(low + (in.gate_up_interleave != 0 ? kGatedColumns : in.inter)) {}
};

// Both halves from `column` on: in memory's order where vectors reach them, else gates first. What
// does not exist is zero.
template <GatedCase kCase>
__device__ __forceinline__ void load_raw(const GatedPlan& in, const uint16_t* row, int32_t column,
                                         GatedRaw (&raw)[2]) {
  const int32_t inter = static_cast<int32_t>(in.inter);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t first = column + h * kGatedHalf;
    if (!in_vectors<kCase>(in)) {
      raw[h] = load_elements(row, inter, in.gate_up_interleave, first);
    } else if (first < inter) {
      const GatedVectors at(in, row, first);
      raw[h] = {stream16(at.low), stream16(at.high)};
    } else {
      raw[h] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    }
  }
}

// Stages of cp.async in shared memory, so that loads in flight need no registers. A thread reads
// only what it copied itself, so no barrier is needed.
class GatedStages {
 public:
  static constexpr int kStages = 2;
  static constexpr int kBytesAThread = kStages * 4 * sizeof(uint4);

  __device__ explicit GatedStages(uint4* shared) : slots_(shared + threadIdx.x) {}

  __device__ __forceinline__ void fetch(const GatedPlan& in, const uint16_t* row, int32_t column,
                                        int stage) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t first = column + h * kGatedHalf;
      if (first >= in.inter) continue;
      const GatedVectors at(in, row, first);
      cp_async_16(cast_smem_ptr_to_uint(slot(stage, 2 * h)), at.low);
      cp_async_16(cast_smem_ptr_to_uint(slot(stage, 2 * h + 1)), at.high);
    }
  }

  __device__ __forceinline__ void take(const GatedPlan& in, int32_t column, int stage,
                                       GatedRaw (&raw)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool there = column + h * kGatedHalf < in.inter;
      const uint4 zero = make_uint4(0, 0, 0, 0);
      raw[h] = {there ? *slot(stage, 2 * h) : zero, there ? *slot(stage, 2 * h + 1) : zero};
    }
  }

 private:
  __device__ __forceinline__ uint4* slot(int stage, int i) const {
    return slots_ + (stage * 4 + i) * blockDim.x;
  }

  uint4* slots_;
};

template <GatedCase kCase>
__device__ __forceinline__ void widen_raw(const GatedPlan& in, const GatedRaw& raw,
                                          float (&g)[kGatedColumns], float (&u)[kGatedColumns]) {
  const uint32_t words[8] = {raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
                             raw.high.x, raw.high.y, raw.high.z, raw.high.w};
  if (in.gate_up_interleave == 1 && in_vectors<kCase>(in)) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      g[i] = bits_float(words[i] << 16);
      u[i] = bits_float(words[i] & 0xffff0000u);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    g[2 * i] = bits_float(words[i] << 16);
    g[2 * i + 1] = bits_float(words[i] & 0xffff0000u);
    u[2 * i] = bits_float(words[4 + i] << 16);
    u[2 * i + 1] = bits_float(words[4 + i] & 0xffff0000u);
  }
}

template <GatedCase kCase, typename Element>
__device__ __forceinline__ void add_bias_row(const GatedPlan& in, const Element* row,
                                             int64_t column, float (&g)[kGatedColumns],
                                             float (&u)[kGatedColumns]) {
  float low[kGatedColumns];
  float high[kGatedColumns];
  if (in_vectors<kCase>(in)) {
    if (column >= in.inter) return;
    const Element* at = row + (in.gate_up_interleave == 0 ? column : 2 * column);
    load8(at, low);
    load8(at + (in.gate_up_interleave == 0 ? in.inter : kGatedColumns), high);
    if (in.gate_up_interleave != 1) {
#pragma unroll
      for (int i = 0; i < kGatedColumns; ++i) g[i] += low[i], u[i] += high[i];
      return;
    }
#pragma unroll
    for (int i = 0; i < kGatedColumns / 2; ++i) {
      g[i] += low[2 * i], u[i] += low[2 * i + 1];
      g[i + 4] += high[2 * i], u[i + 4] += high[2 * i + 1];
    }
    return;
  }
  const int64_t stride = in.gate_up_interleave == 0 ? 1 : 2;
  const Element* gate = row + column * stride;
  const Element* up = gate + (in.gate_up_interleave == 0 ? in.inter : 1);
#pragma unroll
  for (int i = 0; i < kGatedColumns; ++i) {
    if (column + i >= in.inter) continue;
    load_some(gate + i * stride, 1, low);
    load_some(up + i * stride, 1, high);
    g[i] += low[0], u[i] += high[0];
  }
}

template <GatedCase kCase>
__device__ __forceinline__ void add_bias(const GatedPlan& in, int32_t expert, int32_t column,
                                         float (&g)[kGatedColumns], float (&u)[kGatedColumns]) {
  if (expert >= in.bias.experts) return;
  const int64_t offset = expert * in.bias.row_stride;
  if (in.bias.is_float) {
    add_bias_row<kCase>(in, static_cast<const float*>(in.bias.data) + offset, column, g, u);
  } else {
    add_bias_row<kCase>(in, static_cast<const uint16_t*>(in.bias.data) + offset, column, g, u);
  }
}

template <typename Activation, GatedCase kCase>
__device__ __forceinline__ void gated_products(const GatedPlan& in, const Activation& activation,
                                               int32_t expert, int32_t column,
                                               float (&g)[kGatedColumns], float (&u)[kGatedColumns],
                                               float (&y)[kGatedColumns]) {
  if (kCase != GatedCase::kPlain && in.bias.data != nullptr) {
    add_bias<kCase>(in, expert, column, g, u);
  }
  if (in.activation.limited()) {
    const float limit = in.activation.limit;
#pragma unroll
    for (int i = 0; i < kGatedColumns; ++i) {
      g[i] = clamp_above(g[i], limit);
      u[i] = clamp_both(u[i], limit);
    }
  }
#pragma unroll
  for (int i = 0; i < kGatedColumns; ++i) y[i] = activation(g[i], u[i]);
}

}  // namespace dgmoe
