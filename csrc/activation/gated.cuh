// The walk of the gated activations over valid rows, for a sink that takes eight products a thread:
//   void take(batch, row, column, count, y)   count of them exist; called by whole half warps
//   void pad(batch, row, first, step)         scale columns first, first + step, .. of padding
//   constexpr bool kPads                      whether there is a pad
#pragma once

#include "../common/cuda.cuh"
#include "gated.h"

namespace dgmoe {

constexpr int kGatedLanes = 16;   // threads of a half warp
constexpr int kGatedColumns = 8;  // columns a thread
constexpr int kGatedSpan = kGatedLanes * kGatedColumns;
constexpr int kGatedThreads = 256;  // most threads a block
constexpr int kGatedExperts = 4;    // experts a thread counts at once

// A block is `rows` times `width` half warps and takes as many rows at once; a row's columns take
// it as many steps as they need.
struct GatedTiling {
  int width, rows, threads;

  static GatedTiling of(int64_t inter) {
    constexpr int64_t kSlots = kGatedThreads / kGatedLanes;
    const int64_t spans = ceil_div(inter, kGatedSpan);
    const int64_t steps = ceil_div(spans, kSlots);
    const int64_t width = spans == 0 ? 1 : ceil_div(spans, steps);
    const int64_t rows = kSlots / width;
    return {static_cast<int>(width), static_cast<int>(rows),
            static_cast<int>(round_up(width * rows * kGatedLanes, 32))};
  }
};

// Where a thread stands in its block.
struct GatedPlace {
  int row, index;  // of the block's rows, of the row's threads
  int row_threads;

  __device__ explicit GatedPlace(const GatedTiling& tiling) {
    const int slot = threadIdx.x / kGatedLanes;
    row = slot / tiling.width;
    row_threads = tiling.width * kGatedLanes;
    index = threadIdx.x - row * row_threads;
  }
};

template <typename Sink>
__device__ __forceinline__ void gated_row(const GatedPlan& in, const Sink& sink,
                                          const GatedPlace& place, int64_t batch, int64_t row) {
  const uint16_t* gate = in.gate_up + batch * in.batch_stride + row * in.row_stride;
  const uint16_t* up = gate + in.inter;
  const bool vectors = in.inter % kGatedColumns == 0;
  // The bound is that of the half warp, so that it stays together for the sink.
  const int64_t step = static_cast<int64_t>(place.row_threads) * kGatedColumns;
  const int64_t lane = place.index % kGatedLanes * kGatedColumns;
  for (int64_t first = static_cast<int64_t>(place.index) * kGatedColumns - lane; first < in.inter;
       first += step) {
    const int64_t column = first + lane;
    const int64_t left = in.inter - column;
    const int64_t count =
        left < kGatedColumns ? left : kGatedColumns;  // not positive: past the end
    float g[kGatedColumns];
    float u[kGatedColumns];
    if (vectors && count > 0) {
      load8(gate + column, g);
      load8(up + column, u);
    } else {
      load_some(gate + column, count, g);
      load_some(up + column, count, u);
    }
#pragma unroll
    for (int i = 0; i < kGatedColumns; ++i) g[i] = silu(g[i]) * u[i];
    sink.take(batch, row, column, count, g);
  }
}

// Every row of one batch, the valid ones by m_indices.
template <typename Sink>
__global__ void __launch_bounds__(kGatedThreads)
    gated_contig_kernel(GatedPlan in, GatedTiling tiling, Sink sink) {
  const GatedPlace place(tiling);
  if (place.row >= tiling.rows) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * tiling.rows;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * tiling.rows + place.row; row < in.rows;
       row += step) {
    if (in.valid(0, row)) {
      gated_row(in, sink, place, 0, row);
    } else if constexpr (Sink::kPads) {
      if (in.in_tile(0, row)) sink.pad(0, row, place.index, place.row_threads);
    }
  }
}

__device__ __forceinline__ int64_t gated_valid_rows(const GatedPlan& in, int64_t batch) {
  if (batch >= in.batches) return 0;
  const int64_t count = in.masked_m[batch];
  return count < 0 ? 0 : count < in.rows ? count : in.rows;
}

// ends[i] becomes the valid rows of experts base .. base + i; returns those of all that fit.
__device__ __forceinline__ int64_t count_gated_rows(const GatedPlan& in, int64_t base,
                                                    int64_t* ends, int64_t* warp_totals) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int64_t counts[kGatedExperts];
  int64_t own = 0;
#pragma unroll
  for (int i = 0; i < kGatedExperts; ++i) {
    counts[i] = gated_valid_rows(in, base + threadIdx.x * kGatedExperts + i);
    own += counts[i];
  }
  int64_t sum = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int64_t before = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += before;
  }
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  int64_t end = sum - own;
  int64_t total = 0;
  for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) {
    if (i < warp) end += warp_totals[i];
    total += warp_totals[i];
  }
#pragma unroll
  for (int i = 0; i < kGatedExperts; ++i) {
    end += counts[i];
    ends[threadIdx.x * kGatedExperts + i] = end;
  }
  __syncthreads();
  return total;
}

// The valid rows of all experts, counted as one sequence that the blocks share evenly: a slab is
// mostly padding, and which part is not, only the device knows.
template <typename Sink>
__global__ void __launch_bounds__(kGatedThreads)
    gated_masked_kernel(GatedPlan in, GatedTiling tiling, Sink sink) {
  __shared__ int64_t ends[kGatedThreads * kGatedExperts];
  __shared__ int64_t warp_totals[kGatedThreads / 32];
  const GatedPlace place(tiling);
  const int64_t experts = static_cast<int64_t>(blockDim.x) * kGatedExperts;
  for (int64_t base = 0; base < in.batches; base += experts) {
    if (base > 0) __syncthreads();  // the counts before are still being read
    const int64_t total = count_gated_rows(in, base, ends, warp_totals);
    const int64_t share = round_up(ceil_div(total, gridDim.x), tiling.rows);
    const int64_t begin = blockIdx.x * share;
    const int64_t end = begin + share < total ? begin + share : total;
    if (place.row >= tiling.rows || begin + place.row >= end) continue;
    // The first expert that ends past the row.
    int low = 0;
    int high = static_cast<int>(experts) - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ends[middle] > begin + place.row) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    for (int64_t i = begin + place.row; i < end; i += tiling.rows) {
      while (ends[low] <= i) ++low;
      gated_row(in, sink, place, base + low, i - (low == 0 ? 0 : ends[low - 1]));
    }
  }
  if constexpr (Sink::kPads) {
    // From the last block on, which has the fewest rows.
    for (int64_t batch = gridDim.x - 1 - blockIdx.x; batch < in.batches; batch += gridDim.x) {
      const int64_t valid = gated_valid_rows(in, batch);
      const int64_t tile_end = round_up(valid, in.alignment);
      const int64_t stop = tile_end < in.rows ? tile_end : in.rows;
      for (int64_t row = valid + threadIdx.x % 32; row < stop; row += 32) {
        sink.pad(batch, row, threadIdx.x / 32, blockDim.x / 32);
      }
    }
  }
}

template <typename Sink>
void launch_gated(const GatedPlan& in, const CudaScope& scope, const Sink& sink) {
  if (in.inter == 0) return;
  const GatedTiling tiling = GatedTiling::of(in.inter);
  const int64_t blocks = ceil_div(in.batches * in.rows, tiling.rows);
  if (in.masked) {
    // No more than run at once: each counts all experts before it starts.
    DGMOE_LAUNCH(gated_masked_kernel<Sink>, grid_for(blocks, 4), tiling.threads, 0, scope, in,
                 tiling, sink);
  } else {
    DGMOE_LAUNCH(gated_contig_kernel<Sink>, grid_for(blocks, 16), tiling.threads, 0, scope, in,
                 tiling, sink);
  }
}

}  // namespace dgmoe
