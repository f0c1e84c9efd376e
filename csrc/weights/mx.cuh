// The CUDA side of mx.h: four threads a group of 32 columns, eight columns a thread.
#pragma once

#include "../common/cuda.cuh"
#include "mx.h"

namespace dgmoe {

constexpr int kOctetThreads = 256;

// The four lanes of this thread's group. They stay together: octets of a row are a multiple of four.
__device__ __forceinline__ unsigned group_lanes() { return 0xfu << (threadIdx.x & 28u); }

// Where a thread works: `left` columns of row `line` (of all batches) from column `column` on.
struct Octet {
  int64_t line, batch, row, column, left, group;
};

__device__ __forceinline__ Octet octet_at(const WeightRows& weight, int64_t i) {
  const int64_t octets = weight.groups() * kMxOctets;
  const int64_t line = i / octets;
  const int64_t octet = i - line * octets;
  const int64_t batch = line / weight.n;
  return {line, batch, line - batch * weight.n, octet * 8, weight.k - octet * 8, octet / kMxOctets};
}

// Loads the eight columns, zero past the end, and returns the bits of the group's largest |x|.
template <typename Element>
__device__ __forceinline__ uint32_t load_octet(const WeightRows& weight, const Octet& at,
                                               bool vectors, float (&x)[8]) {
  const Element* in =
      static_cast<const Element*>(weight.data) + weight.offset(at.batch, at.row) + at.column;
  if (vectors && at.left > 0) {
    load8(in, x);
  } else {
    load_some(in, at.left, x);
  }
  uint32_t amax_bits = amax8_bits(x);
#pragma unroll
  for (int lane = 1; lane < kMxOctets; lane *= 2) {
    const uint32_t other = __shfl_xor_sync(group_lanes(), amax_bits, lane);
    amax_bits = other > amax_bits ? other : amax_bits;
  }
  return amax_bits;
}

// Launches the kernel for a weight's dtype with a thread an octet, or some octets a thread.
template <typename Plan>
void launch_octets(void (*of_bf16)(Plan), void (*of_float)(Plan), const CudaScope& scope,
                   const Plan& plan) {
  const WeightRows& rows = plan.weight;
  const int64_t octets = rows.batches * rows.n * rows.groups() * kMxOctets;
  const auto kernel = rows.is_bf16 ? of_bf16 : of_float;
  const unsigned grid = grid_for(ceil_div(octets, kOctetThreads), 16);
  DGMOE_LAUNCH(kernel, grid, kOctetThreads, 0, scope, plan);
}

}  // namespace dgmoe
