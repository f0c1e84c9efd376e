// The CUDA kernel of the combining ops.
#pragma once

#include "../common/cuda.cuh"
#include "weighted_rows.h"

namespace dgmoe {

constexpr int kWeightedThreads = 256;  // most threads a block
constexpr int kWeightedColumns = 8;    // columns a thread
constexpr int kWeightedSlots = 32;     // slots that a warp looks up at once

// The slots of a token that have a row, in slot order.
struct WeightedSlots {
  int64_t offsets[kWeightedSlots];  // of the rows in y
  int64_t biases[kWeightedSlots];   // of their rows in the bias, or -1
  float weights[kWeightedSlots];
  int count;
};

// For the first warp; other threads see the slots after the next barrier.
__device__ __forceinline__ void look_up(const WeightedRowsPlan& plan, int64_t t, int64_t first,
                                        WeightedSlots& slots) {
  const int64_t i = first + threadIdx.x;
  const int64_t row = i < plan.top_k ? plan.row(t, i) : -1;
  const uint32_t found = __ballot_sync(0xffffffffu, row >= 0);
  if (row >= 0) {
    const int place = __popc(found & ((1u << threadIdx.x) - 1u));
    slots.offsets[place] = row * plan.y_row_stride;
    slots.weights[place] = plan.weights(t, i);
    if (plan.bias.data != nullptr) slots.biases[place] = plan.bias.offset(t, i);
  }
  if (threadIdx.x == 0) slots.count = __popc(found);
}

// Adds eight columns of a row of the bias, of which `left` exist.
__device__ __forceinline__ void add_bias(const RowBias& bias, int64_t offset, int64_t left,
                                         float (&x)[kWeightedColumns]) {
  float b[kWeightedColumns];
  if (bias.is_float) {
    const float* from = static_cast<const float*>(bias.data) + offset;
    if (left >= kWeightedColumns && bias.row_stride % kWeightedColumns == 0) {
      load8(from, b);
    } else {
      load_some(from, left, b);
    }
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(bias.data) + offset;
    if (left >= kWeightedColumns && bias.row_stride % kWeightedColumns == 0) {
      load8(from, b);
    } else {
      load_some(from, left, b);
    }
  }
#pragma unroll
  for (int j = 0; j < kWeightedColumns; ++j) x[j] += b[j];
}

// A block takes a token's columns [tile * blockDim * 8, ..), a thread eight of them.
template <bool kBias>
__global__ void __launch_bounds__(kWeightedThreads)
    weighted_rows_kernel(WeightedRowsPlan plan, int64_t tiles) {
  __shared__ WeightedSlots slots;
  const bool y_vectors = plan.y_row_stride % kWeightedColumns == 0;
  const bool out_vectors = plan.hidden % kWeightedColumns == 0;
  for (int64_t unit = blockIdx.x; unit < plan.tokens * tiles; unit += gridDim.x) {
    const int64_t t = unit / tiles;
    const int64_t column = ((unit - t * tiles) * blockDim.x + threadIdx.x) * kWeightedColumns;
    const int64_t left = plan.hidden - column;  // not positive: past the end
    float sums[kWeightedColumns] = {};
    for (int64_t first = 0; first < plan.top_k; first += kWeightedSlots) {
      __syncthreads();  // others may still read the slots before
      if (threadIdx.x < 32) look_up(plan, t, first, slots);
      __syncthreads();
      if (left <= 0) continue;
      const uint16_t* y = plan.y + column;
      const int count = slots.count;
      if (y_vectors && left >= kWeightedColumns) {
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
          float x[kWeightedColumns];
          load8(y + slots.offsets[i], x);
          if (kBias && slots.biases[i] >= 0) {
            add_bias(plan.bias, slots.biases[i] + column, left, x);
          }
          const float weight = slots.weights[i];
#pragma unroll
          for (int j = 0; j < kWeightedColumns; ++j) {
            sums[j] = fused_multiply_add(x[j], weight, sums[j]);
          }
        }
      } else {
        for (int i = 0; i < count; ++i) {
          float x[kWeightedColumns];
          load_some(y + slots.offsets[i], left, x);
          if (kBias && slots.biases[i] >= 0) {
            add_bias(plan.bias, slots.biases[i] + column, left, x);
          }
          const float weight = slots.weights[i];
#pragma unroll
          for (int j = 0; j < kWeightedColumns; ++j) {
            sums[j] = fused_multiply_add(x[j], weight, sums[j]);
          }
        }
      }
    }
    if (left <= 0) continue;
#pragma unroll
    for (int j = 0; j < kWeightedColumns; ++j) sums[j] *= plan.factor;
    uint16_t* out = plan.out + t * plan.hidden + column;
    if (out_vectors) {
      store8_bf16(out, sums);
    } else {
      store_some_bf16(out, left, sums);
    }
  }
}

inline void weighted_rows_cuda(const WeightedRowsPlan& plan, const CudaScope& scope) {
  if (plan.hidden == 0) return;
  // Tiles of even width, so that the last one wastes no threads.
  const int64_t chunks = ceil_div(plan.hidden, kWeightedColumns);
  const int64_t tiles = ceil_div(chunks, kWeightedThreads);
  const int threads = static_cast<int>(round_up(ceil_div(chunks, tiles), 32));
  const unsigned grid = grid_for(plan.tokens * tiles, 32);
  if (plan.bias.data != nullptr) {
    DGMOE_LAUNCH(weighted_rows_kernel<true>, grid, threads, 0, scope, plan, tiles);
  } else {
    DGMOE_LAUNCH(weighted_rows_kernel<false>, grid, threads, 0, scope, plan, tiles);
  }
}

}  // namespace dgmoe
