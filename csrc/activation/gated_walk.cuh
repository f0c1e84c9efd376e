// The walk of the CUDA kernels over valid rows, sixteen columns a thread, for a sink:
//   void take<case>(batch, row, column, y)    y[0] at column on, y[1] kGatedHalf past it, zero where
//                                             there is no column; called by all lanes of a span
//   void pad(batch, row, first, step)         scale columns first, first + step, .. of padding
//   constexpr bool kPads                      whether there is a pad
#pragma once

#include "../common/scan.cuh"
#include "gated_columns.cuh"

namespace dgmoe {

constexpr int kGatedThreads = 256;   // most threads a block
constexpr int kGatedExperts = 1024;  // experts counted at once
constexpr int kGatedLook = 8;        // entries of m_indices a thread looks at at once; up to 32

// Blocks of kGatedThreads that a multiprocessor holds at least: four leave 64 registers a thread.
constexpr int gated_resident(GatedCase kind) { return kind == GatedCase::kPlain ? 4 : 2; }

// A block is `rows` times `width` spans wide and takes as many rows at once; a row's columns take
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

struct GatedSpot {
  int32_t batch, row, expert;
};

struct GatedStep {
  GatedSpot spot;
  int32_t column;
  bool there;
};

// The steps of a thread: the rows of `walk`, and in each the columns that fall to the thread.
template <typename Walk>
class GatedSteps {
 public:
  __device__ GatedSteps(const GatedPlan& in, const GatedPlace& place, Walk& walk)
      : walk_(walk),
        inter_(static_cast<int32_t>(in.inter)),
        lane_(place.index % kGatedLanes * kGatedColumns),
        begin_(place.index / kGatedLanes * kGatedSpan),
        step_(place.row_threads / kGatedLanes * kGatedSpan),
        first_(inter_) {}

  // A span's threads get the same answer; after the last step every further one is not there.
  __device__ __forceinline__ void next(GatedStep& step) {
    first_ += step_;
    step.there = true;
    if (first_ >= inter_) {
      step.there = begin_ < inter_ && walk_.next(spot_);
      first_ = step.there ? begin_ : inter_;
    }
    step.spot = spot_;
    step.column = first_ + lane_;
  }

 private:
  Walk& walk_;
  GatedSpot spot_{};
  int32_t inter_, lane_, begin_, step_;
  int32_t first_;
};

// Takes the steps to the sink, the columns of the next ones under way while one is computed.
template <typename Activation, GatedCase kCase, typename Walk, typename Sink>
__device__ __forceinline__ void gated_walk(const GatedPlan& in, const Sink& sink,
                                           const GatedPlace& place, Walk& walk) {
  constexpr bool kStaged = kCase != GatedCase::kAny;
  constexpr int kAhead = kStaged ? GatedStages::kStages - 1 : 1;
  extern __shared__ uint4 gated_stages[];
  const GatedStages stages(gated_stages);
  const Activation activation(in.activation);
  GatedSteps<Walk> steps(in, place, walk);
  const auto row_of = [&](const GatedSpot& spot) {
    return in.gate_up + spot.batch * in.batch_stride + spot.row * in.row_stride;
  };
  GatedStep ahead[kAhead];
  const auto look = [&](GatedStep& step, int stage) {
    steps.next(step);
    if constexpr (kStaged) {
      if (step.there) stages.fetch(in, row_of(step.spot), step.column, stage);
      cp_async_fence();
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) look(ahead[i], i);
  int stage = 0;
  while (ahead[0].there) {
    const GatedStep step = ahead[0];
#pragma unroll
    for (int i = 1; i < kAhead; ++i) ahead[i - 1] = ahead[i];
    look(ahead[kAhead - 1], stage == 0 ? kAhead : stage - 1);
    GatedRaw raw[2];
    if constexpr (kStaged) {
      cp_async_wait<kAhead>();
      stages.take(in, step.column, stage, raw);
      stage = stage == kAhead ? 0 : stage + 1;
    } else {
      load_raw<kCase>(in, row_of(step.spot), step.column, raw);
    }
    float y[2][kGatedColumns];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float g[kGatedColumns];
      float u[kGatedColumns];
      widen_raw<kCase>(in, raw[h], g, u);
      gated_products<Activation, kCase>(in, activation, step.spot.expert,
                                        step.column + h * kGatedHalf, g, u, y[h]);
    }
    sink.template take<kCase>(step.spot.batch, step.spot.row, step.column, y);
  }
}

// Every row of one batch, the valid ones by m_indices. Entries are read kGatedLook rows at a time,
// all under way together: where few rows are valid, the walk is a walk over entries.
class GatedContigWalk {
 public:
  __device__ GatedContigWalk(const GatedPlan& in, int64_t first, int64_t step)
      : in_(in), first_(first), next_(first), step_(step), valid_(0) {}

  __device__ __forceinline__ bool next(GatedSpot& spot) {
    while (valid_ == 0) {
      if (next_ >= in_.rows) return false;
      first_ = next_;
      look();
    }
    const int i = __ffs(valid_) - 1;
    valid_ &= valid_ - 1;
    const int64_t row = first_ + i * step_;
    spot.batch = 0;
    spot.row = static_cast<int32_t>(row);
    spot.expert = in_.m_indices == nullptr ? 0 : in_.m_indices[row];  // only a bias asks for it
    return true;
  }

 private:
  __device__ __forceinline__ void look() {
#pragma unroll
    for (int i = 0; i < kGatedLook; ++i, next_ += step_) {
      const bool valid =
          next_ < in_.rows && (in_.m_indices == nullptr || in_.m_indices[next_] >= 0);
      valid_ |= static_cast<uint32_t>(valid) << i;
    }
  }

  const GatedPlan& in_;
  int64_t first_, next_;  // row of bit 0 of valid_, and the first row not looked at
  int64_t step_;
  uint32_t valid_;
};

// Padding within tiles of valid rows, a lane a row, since a column of scales stands row by row.
template <typename Sink>
__device__ __forceinline__ void pad_contig(const GatedPlan& in, const Sink& sink) {
  if (in.m_indices == nullptr) return;
  for (int64_t first = int64_t{blockIdx.x} * 32; first < in.rows;
       first += int64_t{gridDim.x} * 32) {
    const int64_t row = first + threadIdx.x % 32;
    if (row < in.rows && in.m_indices[row] < 0 && in.in_tile(0, row)) {
      sink.pad(0, row, threadIdx.x / 32, blockDim.x / 32);
    }
  }
}

template <typename Activation, GatedCase kCase, typename Sink>
__global__ void __launch_bounds__(kGatedThreads, gated_resident(kCase))
    gated_contig_kernel(const __grid_constant__ GatedPlan in, GatedTiling tiling,
                        const __grid_constant__ Sink sink) {
  const GatedPlace place(tiling);
  if (place.row < tiling.rows) {
    GatedContigWalk walk(in, int64_t{blockIdx.x} * tiling.rows + place.row,
                         int64_t{gridDim.x} * tiling.rows);
    gated_walk<Activation, kCase>(in, sink, place, walk);
  }
  if constexpr (Sink::kPads) pad_contig(in, sink);
}

__device__ __forceinline__ int64_t gated_valid_rows(const GatedPlan& in, int64_t batch) {
  if (batch >= in.batches) return 0;
  const int64_t count = in.masked_m[batch];
  return count < 0 ? 0 : count < in.rows ? count : in.rows;
}

// ends[i] becomes the valid rows of experts base .. base + i, for kGatedExperts of them or as many
// as there are; returns those of all. Every warp counts for itself, so that only the reading of
// ends waits for another.
__device__ __forceinline__ int64_t count_gated_rows(const GatedPlan& in, int64_t base, int experts,
                                                    int64_t* ends) {
  const int lane = threadIdx.x % 32;
  const int slice = (experts + 31) / 32;
  int64_t own = 0;
#pragma unroll 8
  for (int i = 0; i < slice; ++i) own += gated_valid_rows(in, base + lane * slice + i);
  const int64_t upto = warp_inclusive_sum(own);
  if (threadIdx.x < 32) {
    int64_t end = upto - own;
    for (int i = lane * slice; i < (lane + 1) * slice && i < experts; ++i) {
      end += gated_valid_rows(in, base + i);
      ends[i] = end;
    }
  }
  __syncthreads();
  return __shfl_sync(0xffffffffu, upto, 31);
}

// Rows [i, end) of the valid ones of experts base on, counted as one sequence, in steps.
class GatedMaskedWalk {
 public:
  __device__ GatedMaskedWalk(int32_t base, const int64_t* ends, int experts, int64_t i, int64_t end,
                             int step)
      : base_(base), ends_(ends), i_(i), end_(end), step_(step), low_(0) {
    if (i >= end) return;
    // The first expert that ends past the row.
    int high = experts - 1;
    while (low_ < high) {
      const int middle = (low_ + high) / 2;
      if (ends[middle] > i) {
        high = middle;
      } else {
        low_ = middle + 1;
      }
    }
  }

  __device__ __forceinline__ bool next(GatedSpot& spot) {
    if (i_ >= end_) return false;
    while (ends_[low_] <= i_) ++low_;
    spot.batch = base_ + low_;
    spot.row = static_cast<int32_t>(i_ - (low_ == 0 ? 0 : ends_[low_ - 1]));
    spot.expert = spot.batch;
    i_ += step_;
    return true;
  }

 private:
  int32_t base_;
  const int64_t* ends_;
  int64_t i_, end_;
  int step_, low_;
};

// The valid rows of all experts, counted as one sequence that the blocks share evenly: a slab is
// mostly padding, and which part is not, only the device knows.
template <typename Activation, GatedCase kCase, typename Sink>
__global__ void __launch_bounds__(kGatedThreads, gated_resident(kCase))
    gated_masked_kernel(const __grid_constant__ GatedPlan in, GatedTiling tiling,
                        const __grid_constant__ Sink sink) {
  __shared__ int64_t ends[kGatedExperts];
  const GatedPlace place(tiling);
  for (int64_t base = 0; base < in.batches; base += kGatedExperts) {
    if (base > 0) __syncthreads();  // the counts before are still being read
    const int64_t left = in.batches - base;
    const int experts = static_cast<int>(left < kGatedExperts ? left : kGatedExperts);
    const int64_t total = count_gated_rows(in, base, experts, ends);
    const int64_t share = round_up(ceil_div(total, gridDim.x), tiling.rows);
    const int64_t begin = blockIdx.x * share;
    const int64_t end = begin + share < total ? begin + share : total;
    if (place.row >= tiling.rows) continue;
    GatedMaskedWalk walk(static_cast<int32_t>(base), ends, experts, begin + place.row, end,
                         tiling.rows);
    gated_walk<Activation, kCase>(in, sink, place, walk);
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

}  // namespace dgmoe
