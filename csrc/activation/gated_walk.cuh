// The walk of the CUDA kernels over valid rows, sixteen columns a thread, for a sink:
//   void take<case>(batch, row, column, y)    y[0] at column on, y[1] kGatedHalf past it, zero where
//                                             there is no column; called by all lanes of a span
//   void pad(batch, row, first, step)         scale columns first, first + step, .. of padding
//   constexpr bool kPads                      whether there is a pad
#pragma once

#include "gated_columns.cuh"

namespace dgmoe {

constexpr int kGatedThreads = 256;  // most threads a block
constexpr int kGatedLook = 8;       // entries of m_indices a thread looks at at once; up to 32

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
      commit_async();
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
      wait_async<kAhead>();
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

// Every row of one batch, the valid ones by m_indices. Entries are read kGatedLook rows at a time, all
// under way together: where few rows are valid, the walk is a walk over entries.
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

// The valid rows of all experts as one sequence, of which a block takes a share.
struct GatedShare {
  int64_t rows;        // of the share
  int32_t expert;      // where it begins
  uint32_t in_expert;  // rows of that expert before it
};

// Every warp counts for itself, so that no block waits for its warps: a lane counts the experts of a
// slice, the warp finds the lane of the first row, and then the expert in its slice.
__device__ __forceinline__ GatedShare gated_share(const GatedPlan& in, int granule) {
  constexpr uint32_t kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const int64_t slice = ceil_div(in.batches, 32);
  int64_t own = 0;
#pragma unroll 8
  for (int64_t i = 0; i < slice; ++i) own += gated_valid_rows(in, lane * slice + i);
  int64_t upto = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int64_t before = __shfl_up_sync(kAll, upto, offset);
    if (lane >= offset) upto += before;
  }
  const int64_t total = __shfl_sync(kAll, upto, 31);
  const int64_t share = round_up(ceil_div(total, gridDim.x), granule);
  const int64_t begin = blockIdx.x * share;
  if (begin >= total) return {0, 0, 0};
  const int first = __ffs(__ballot_sync(kAll, upto > begin)) - 1;
  int64_t before = begin - __shfl_sync(kAll, upto - own, first);
  int64_t expert = first * slice;
  for (int64_t count; before >= (count = gated_valid_rows(in, expert)); ++expert) before -= count;
  return {begin + share < total ? share : total - begin, static_cast<int32_t>(expert),
          static_cast<uint32_t>(before)};
}

// Every step-th row of a share.
class GatedMaskedWalk {
 public:
  __device__ GatedMaskedWalk(const GatedPlan& in, const GatedShare& share, int first, int step)
      : in_(in),
        left_(share.rows - first),
        step_(step),
        expert_(share.expert),
        row_(share.in_expert + first),
        count_(static_cast<uint32_t>(gated_valid_rows(in, share.expert))) {}

  __device__ __forceinline__ bool next(GatedSpot& spot) {
    if (left_ <= 0) return false;
    if (row_ >= count_) skip();
    spot.batch = expert_;
    spot.row = static_cast<int32_t>(row_);
    spot.expert = expert_;
    row_ += step_;
    left_ -= step_;
    return true;
  }

 private:
  // To the expert of the row. Most experts may be empty, so that several are read at once.
  __device__ __forceinline__ void skip() {
    constexpr int kAtOnce = 8;
    while (row_ >= count_) {
      uint32_t counts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        counts[i] = static_cast<uint32_t>(gated_valid_rows(in_, expert_ + 1 + i));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (row_ < count_) continue;
        row_ -= count_;
        count_ = counts[i];
        ++expert_;
      }
    }
  }

  const GatedPlan& in_;
  int64_t left_;
  int step_, expert_;
  uint32_t row_, count_;  // rows are below 2^31, so that a sum with a step does not wrap
};

// The valid rows of all experts, counted as one sequence that the blocks share evenly: a slab is
// mostly padding, and which part is not, only the device knows.
template <typename Activation, GatedCase kCase, typename Sink>
__global__ void __launch_bounds__(kGatedThreads, gated_resident(kCase))
    gated_masked_kernel(const __grid_constant__ GatedPlan in, GatedTiling tiling,
                        const __grid_constant__ Sink sink) {
  const GatedPlace place(tiling);
  const GatedShare share = gated_share(in, tiling.rows);
  if (place.row < tiling.rows) {
    GatedMaskedWalk walk(in, share, place.row, tiling.rows);
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
