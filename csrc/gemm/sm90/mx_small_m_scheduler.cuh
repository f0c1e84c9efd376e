// Which work the grouped GEMM for few rows has: the tiles, which block takes which, and what a
// thread copies of one.
#pragma once

#include "mx_common.cuh"
#include "mx_small_m_mma.cuh"

namespace dgmoe {

struct MxSmallMPlan : MxPlan {
  // What the list of work is made from: experts, or segments of 128 rows.
  DGMOE_HD int32_t items() const {
    return masked ? experts : static_cast<int32_t>(ceil_div(m, int64_t{kMxSegment}));
  }
};

constexpr int kSmallMThreads = 128;
constexpr int kSmallMMaxSegments = 1024;  // most items
constexpr int kSmallMMaxExperts = 65535;  // most experts
constexpr int kSmallMBlockN = 64;         // rows of a weight that a block takes
constexpr int kSmallMRowBytes = 128;      // of each at once

template <bool kFp4, bool kGranK32, int kTiles>
struct MxSmallMConfig {
  static constexpr int kRows = 8 * kTiles;           // of a
  static constexpr int kColumns = kFp4 ? 256 : 128;  // of k at once
  static constexpr int kGroups = kColumns / 32;
  static constexpr int kWords = kColumns / 128;  // of scales of a weight's row at once
  static constexpr int kAFactors = kGranK32 ? kGroups : kWords;  // scales of a row of a at once
  // a as the tensor core reads it: 8 rows of 16 bytes together, the two of a group side by side.
  static constexpr int kCore = 128;
  static constexpr int kABytes = kRows * kColumns;
  // Where things stand in a stage: the weights, a, the words of both scales.
  static constexpr int kA = kSmallMBlockN * kSmallMRowBytes;
  static constexpr int kBScale = kA + kABytes;
  static constexpr int kAScale = kBScale + kWords * kSmallMBlockN * 4;
  static constexpr int kBytes = kAScale + 128;
  static constexpr int kStages = kFp4 && kTiles == 2 ? 3 : 4;  // so that four blocks have room
  // What is made of a stage before it is computed, of two stages: the scales as factors,
  // [word][row] of four and [scale][row], and FP4's a, parted.
  static constexpr int kBFactors = 0;
  static constexpr int kRowFactors = kWords * kSmallMBlockN * 16;
  static constexpr int kParted = kRowFactors + (kAFactors * kRows * 4 + 127) / 128 * 128;
  static constexpr int kMadeBytes = kParted + (kFp4 ? kABytes : 0);

  static constexpr int shared_bytes(int items) {
    return kStages * kBytes + 2 * kMadeBytes + (3 * items + 1) * 4;
  }
  // Byte of a stage's a where 16 bytes of a row stand, as FP4 copies them.
  static DGMOE_HD constexpr int raw(int row, int chunk) {
    return row * kColumns + (chunk ^ row % 8) * 16;
  }
  // The same as the tensor core reads them: a group's half.
  static DGMOE_HD constexpr int core(int row, int group, int half) {
    return ((row / 8 * kGroups + group) * 2 + half) * kCore + row % 8 * 16;
  }
};

namespace mx_small_m {

// Rows of a that an item has; those of a segment in whole tiles.
template <int kRows>
__device__ __forceinline__ int32_t rows_of(const MxSmallMPlan& p, int32_t item) {
  if (item >= p.items()) return 0;
  if (p.masked) return static_cast<int32_t>(valid_rows(p, p.info[item]));
  const int64_t first = int64_t{item} * kMxSegment;
  int32_t rows = 0;
  while (rows < kMxSegment && first + rows < p.m && p.info[first + rows] >= 0) {
    rows += kRows;
  }
  return static_cast<int32_t>(first + rows < p.m ? rows : p.m - first);
}

// The items that have rows, in order.
struct List {
  int32_t *rows, *first_tile;  // the latter has a further entry: all tiles
  uint16_t *item, *expert;
  int32_t tiles;
};

__device__ __forceinline__ int32_t sum_before(int32_t own, int32_t* totals, int32_t& all) {
  const int lane = threadIdx.x % 32;
  int32_t upto = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t before = __shfl_up_sync(0xffffffffu, upto, offset);
    if (lane >= offset) upto += before;
  }
  if (lane == 31) totals[threadIdx.x / 32] = upto;
  __syncthreads();
  int32_t before = upto - own;
  all = 0;
#pragma unroll
  for (int i = 0; i < kSmallMThreads / 32; ++i) {
    before += i < static_cast<int>(threadIdx.x) / 32 ? totals[i] : 0;
    all += totals[i];
  }
  return before;
}

template <int kRows>
__device__ __forceinline__ List make_list(const MxSmallMPlan& p, int32_t* memory) {
  __shared__ int32_t totals[2][kSmallMThreads / 32];
  const int32_t items = p.items();
  const int32_t slice = (items + kSmallMThreads - 1) / kSmallMThreads;
  const int32_t first = static_cast<int32_t>(threadIdx.x) * slice;
  const int32_t n_tiles = (p.n + kSmallMBlockN - 1) / kSmallMBlockN;
  int32_t tiles = 0;
  int32_t count = 0;
#pragma unroll 1
  for (int32_t item = first; item < first + slice; ++item) {
    const int32_t rows = rows_of<kRows>(p, item);
    tiles += (rows + kRows - 1) / kRows * n_tiles;
    count += rows > 0;
  }
  uint16_t* const halves = reinterpret_cast<uint16_t*>(memory + 2 * items + 1);
  List list{memory, memory + items, halves, halves + items, 0};
  int32_t length;
  int32_t at = sum_before(count, totals[0], length);
  int32_t tile = sum_before(tiles, totals[1], list.tiles);
#pragma unroll 1
  for (int32_t item = first; item < first + slice && count > 0; ++item) {
    const int32_t rows = rows_of<kRows>(p, item);
    if (rows == 0) continue;
    const int32_t expert = p.masked ? item : p.info[int64_t{item} * kMxSegment];
    list.item[at] = static_cast<uint16_t>(item);
    list.expert[at] = static_cast<uint16_t>(expert);
    list.rows[at] = rows;
    list.first_tile[at++] = tile;
    tile += (rows + kRows - 1) / kRows * n_tiles;
  }
  if (threadIdx.x == 0) list.first_tile[length] = list.tiles;
  __syncthreads();
  return list;
}

// Where a tile's results go.
struct Target {
  int64_t row;           // the first, of d
  int32_t first_weight;  // the first column of d
  int32_t left;          // rows from the first on
};

// A block's place in its tiles, and in the columns of one.
template <typename Shape>
struct Cursor {
  int32_t tile, entry, step;
  int32_t expert;
  int64_t scale_row;  // of the expert's scales
  Target target;

  __device__ Cursor() : tile(blockIdx.x), entry(0), step(0) {}

  __device__ __forceinline__ void find(const MxSmallMPlan& p, const List& list) {
    while (list.first_tile[entry + 1] <= tile) ++entry;
    // Tiles of the same weight rows stand next to each other.
    const int32_t rows = list.rows[entry];
    const int32_t row_tiles = (rows + Shape::kRows - 1) / Shape::kRows;
    const int32_t local = tile - list.first_tile[entry];
    const int32_t weight_tile = row_tiles == 1 ? local : local / row_tiles;
    const int32_t first_row = (local - weight_tile * row_tiles) * Shape::kRows;
    const int32_t item = list.item[entry];
    const int64_t base = p.masked ? item * p.m : int64_t{item} * kMxSegment;
    target = {base + first_row, weight_tile * kSmallMBlockN, rows - first_row};
    scale_row = (p.masked ? 0 : base) + first_row;
    expert = list.expert[entry];
  }
};

// What a thread copies of a tile, in steps of its columns.
template <bool kFp4, bool kGranK32, typename Shape>
struct Source {
  static constexpr int kChunks = kSmallMRowBytes / 16;
  static constexpr int kWeightsAtOnce = kSmallMThreads / kChunks;
  static constexpr int kWeightCopies = kSmallMBlockN / kWeightsAtOnce;
  static constexpr int kAChunks = Shape::kColumns / 16;
  static constexpr int kRowsAtOnce = kSmallMThreads / kAChunks;
  static constexpr int kRowCopies = (Shape::kRows + kRowsAtOnce - 1) / kRowsAtOnce;
  static constexpr int kStepsAWord = (kGranK32 ? 128 : 512) / Shape::kColumns;

  const uint8_t *weights, *rows;
  const int32_t *b_scale, *a_scale;
  int64_t weight_stride, row_stride;  // from a copy to the next
  int64_t b_scale_step;               // from a step to the next
  int32_t weights_there, rows_there;  // how many of the rows from the thread's first on
  int32_t bytes_left, columns_left;   // of a row, from the thread's place on
  int32_t words_left;                 // likewise
  bool a_scale_there;

  // The thread's place in what is copied of a at once. FP8: eight rows of a column beside each
  // other, since that is how they stand afterwards.
  static __device__ __forceinline__ int32_t row_chunk() {
    const int32_t thread = threadIdx.x;
    return kFp4 ? thread % kAChunks : thread / 8 % kAChunks;
  }
  static __device__ __forceinline__ int32_t first_row() {
    const int32_t thread = threadIdx.x;
    return kFp4 ? thread / kAChunks : thread / (8 * kAChunks) * 8 + thread % 8;
  }

  __device__ __forceinline__ void aim(const MxSmallMPlan& p, const Cursor<Shape>& at) {
    const int32_t thread = threadIdx.x;
    const int32_t row_bytes = kFp4 ? p.k / 2 : p.k;
    {
      const int32_t byte = thread % kChunks * 16;
      const int32_t first = at.target.first_weight + thread / kChunks;
      weights = p.b + (int64_t{at.expert} * p.n + first) * row_bytes + byte;
      weight_stride = int64_t{kWeightsAtOnce} * row_bytes;
      weights_there = p.n - first;
      bytes_left = row_bytes - byte;
    }
    {
      const int32_t column = row_chunk() * 16;
      const int32_t first = first_row();
      rows = p.a + (at.target.row + first) * p.k + column;
      row_stride = int64_t{kRowsAtOnce} * p.k;
      rows_there = (Shape::kRows < at.target.left ? Shape::kRows : at.target.left) - first;
      columns_left = p.k - column;
    }
    const int32_t weight = at.target.first_weight + thread % kSmallMBlockN;
    const int32_t word = thread / kSmallMBlockN;
    b_scale =
        p.b_scale + at.expert * p.b_scale_batch + weight * p.b_scale_row + word * p.b_scale_word;
    b_scale_step = Shape::kWords * p.b_scale_word;
    words_left = weight < p.n && word < Shape::kWords ? p.k / 128 - word : 0;
    a_scale_there = thread < Shape::kRows && thread < at.target.left;
    a_scale = p.a_scale + (p.masked ? at.expert * p.a_scale_batch : 0) +
              (at.scale_row + thread) * p.a_scale_row;
  }

  // Copies a step and goes to the next.
  __device__ __forceinline__ void copy(const MxSmallMPlan& p, int32_t step, uint32_t stage) {
    const int thread = threadIdx.x;
    {
      // Rows beside each other change their chunks about, so that eight of a column meet all banks.
      const int first = thread / kChunks;
      const uint32_t to = stage + first * kSmallMRowBytes + (thread % kChunks ^ first % 8) * 16;
      const uint8_t* from = weights;
      const int32_t there = bytes_left > 0 ? weights_there : 0;
#pragma unroll
      for (int i = 0; i < kWeightCopies; ++i, from += weight_stride) {
        copy16(to + i * kWeightsAtOnce * kSmallMRowBytes, from, i * kWeightsAtOnce < there);
      }
      weights += kSmallMRowBytes;
      bytes_left -= kSmallMRowBytes;
    }
    {
      // FP4: as it is, to be parted later; FP8: at once as the tensor core reads it.
      const uint8_t* from = rows;
      const int32_t there = columns_left > 0 ? rows_there : 0;
#pragma unroll
      for (int i = 0; i < kRowCopies; ++i, from += row_stride) {
        const int row = first_row() + i * kRowsAtOnce;
        if (Shape::kRows < kRowsAtOnce && row >= Shape::kRows) break;
        const int place = kFp4 ? Shape::raw(row, row_chunk())
                               : Shape::core(row, row_chunk() / 2, row_chunk() % 2);
        copy16(stage + Shape::kA + place, from, i * kRowsAtOnce < there);
      }
      rows += Shape::kColumns;
      columns_left -= Shape::kColumns;
    }
    if (Shape::kWords == 2 || thread < kSmallMBlockN) {
      copy4(stage + Shape::kBScale + thread * 4, b_scale, words_left > 0);
      b_scale += b_scale_step;
      words_left -= Shape::kWords;
    }
    if (thread < Shape::kRows) {
      copy4(stage + Shape::kAScale + thread * 4, a_scale, a_scale_there);
      if (kStepsAWord == 1 || step % kStepsAWord == kStepsAWord - 1) a_scale += p.a_scale_word;
    }
  }
};

}  // namespace mx_small_m
}  // namespace dgmoe
