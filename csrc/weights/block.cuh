// How a CTA processes a 128x128 block of weights: eight columns a thread, sixteen rows at once.
#pragma once

#include "../common/cuda.cuh"

namespace dgmoe {

constexpr int kBlockThreads = 256;
constexpr int kBlockColumns = 8;                                 // columns a thread
constexpr int kBlockRowThreads = kWeightBlock / kBlockColumns;   // threads of a row
constexpr int kBlockRowStep = kBlockThreads / kBlockRowThreads;  // rows at once
constexpr int kBlockThreadRows = kWeightBlock / kBlockRowStep;   // rows a thread

// The maximum over the CTA's threads. `room` is shared memory of one value a warp.
__device__ __forceinline__ uint32_t block_max(uint32_t value, uint32_t* room) {
  value = __reduce_max_sync(0xffffffffu, value);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kBlockThreads / 32; ++w) value = room[w] > value ? room[w] : value;
  __syncthreads();
  return value;
}

}  // namespace dgmoe
