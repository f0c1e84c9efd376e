// The main loop of the CUDA kernels over valid rows, sixteen columns a thread, for a sink:
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
constexpr int kGatedLook = 8;        // entries of m_indices that a thread reads at once; up to 32

// CTAs of kGatedThreads an SM, at least: four leave 64 registers a thread.
constexpr int gated_resident(GatedCase kind) { return kind == GatedCase::kPlain ? 4 : 2; }

// A CTA processes `rows` rows at once, `width` spans of each, and steps over a row's columns.
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

// The thread within its CTA.
struct GatedPlace {
  int row, index;  // row of the CTA, thread of the row
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

// A thread's iterations: the rows of `walk`, and in each the columns of the thread.
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

  // The threads of a span agree on `there`, which stays false after the last step.
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

// Software-pipelined: loads of the next steps are in flight while one is computed.
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
// all loads in flight together: where few rows are valid, reading entries is most of the work.
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
    spot.expert = in_.m_indices == nullptr ? 0 : in_.m_indices[row];  // only a bias needs it
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
  int64_t first_, next_;  // row of bit 0 of valid_, and the first row not read yet
  int64_t step_;
  uint32_t valid_;
};

// Padding within tiles of valid rows, a lane a row, since a column of scales is contiguous.
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

// Inclusive sums of the valid rows of experts base .. base + i to ends[i], for up to kGatedExperts;
// returns the total. Every warp computes them, so that only reads of ends need the barrier.
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

// Valid rows [i, end), numbered through experts from base on, in steps.
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

// The valid rows of all experts, numbered through and shared evenly by the CTAs: a slab is mostly
// padding, and only the device knows which part is not.
template <typename Activation, GatedCase kCase, typename Sink>
__global__ void __launch_bounds__(kGatedThreads, gated_resident(kCase))
    gated_masked_kernel(const __grid_constant__ GatedPlan in, GatedTiling tiling,
                        const __grid_constant__ Sink sink) {
  __shared__ int64_t ends[kGatedExperts];
  const GatedPlace place(tiling);
  for (int64_t base = 0; base < in.batches; base += kGatedExperts) {
    if (base > 0) __syncthreads();  // others may still read the counts before
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
