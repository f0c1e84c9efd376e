// Sums up to a thread and before it, within a warp and within a block. No torch include.
#pragma once

#include <cstdint>

namespace dgmoe {

// The sum up to and including the lane. The whole warp calls.
template <typename T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T below = __shfl_up_sync(0xffffffffu, value, offset);
    if (lane >= offset) value += below;
  }
  return value;
}

// The sum before the thread, and of all threads. The whole block of `warps` full warps calls;
// `warp_sums` is shared memory of `warps` values, which a later call may use only behind a barrier.
template <typename T>
__device__ __forceinline__ T block_exclusive_sum(T value, T* warp_sums, int warps, T& total) {
  const T inclusive = warp_inclusive_sum(value);
  if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = inclusive;
  __syncthreads();
  T before = inclusive - value;
  total = 0;
  for (int i = 0; i < warps; ++i) {
    before += i < static_cast<int>(threadIdx.x) / 32 ? warp_sums[i] : 0;
    total += warp_sums[i];
  }
  return before;
}

}  // namespace dgmoe
