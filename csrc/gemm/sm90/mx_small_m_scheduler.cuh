// Of sm90_mx_small_m: its configuration, and the persistent tile scheduler over a list of segments
// that each CTA makes for itself.
#pragma once

#include "../../common/scan.cuh"
#include "mx_common.cuh"

namespace dgmoe {

struct MxSmallMPlan : MxPlan {
  // A segment is the slab of an expert, or 128 rows of the contiguous layout.
  DGMOE_HD int32_t segments() const {
    return masked ? experts : static_cast<int32_t>(ceil_div(m, int64_t{kMxSegment}));
  }
};

constexpr int kSmallMThreads = 128;
constexpr int kSmallMMaxSegments = 1024;
constexpr int kSmallMMaxExperts = 65535;
constexpr int kSmallMBlockN = 64;     // rows of the weight of a CTA tile
constexpr int kSmallMRowBytes = 128;  // of each in a stage

template <bool kFp4, bool kGranK32, int kTiles>
struct MxSmallMConfig {
  static constexpr int kBlockM = 8 * kTiles;
  static constexpr int kBlockK = kFp4 ? 256 : 128;
  static constexpr int kGroups = kBlockK / 32;  // of columns that share a scale of b
  static constexpr int kWords = kBlockK / 128;  // of scales of a row of b in a stage
  static constexpr int kAScales = kGranK32 ? kGroups : kWords;  // of a row of a in a stage
  // a as wgmma reads it without swizzle: core matrices of 8 rows of 16 bytes, the two of a group of
  // columns side by side.
  static constexpr int kCoreBytes = 128;
  static constexpr int kABytes = kBlockM * kBlockK;
  // Offsets in a stage: b, a, and the words of both scales.
  static constexpr int kA = kSmallMBlockN * kSmallMRowBytes;
  static constexpr int kBScale = kA + kABytes;
  static constexpr int kAScale = kBScale + kWords * kSmallMBlockN * 4;
  static constexpr int kStageBytes = kAScale + 128;
  static constexpr int kStages = kFp4 && kTiles == 2 ? 3 : 4;  // so that four CTAs fit
  // Offsets in a converted stage, of which there are two: the scales as fp32, of b [word][row] of
  // four, of a [scale][row], and for FP4 a with even and odd columns apart.
  static constexpr int kBScaleF32 = 0;
  static constexpr int kAScaleF32 = kWords * kSmallMBlockN * 16;
  static constexpr int kASplit = kAScaleF32 + (kAScales * kBlockM * 4 + 127) / 128 * 128;
  static constexpr int kConvertedBytes = kASplit + (kFp4 ? kABytes : 0);

  static constexpr int smem_bytes(int segments) {
    return kStages * kStageBytes + 2 * kConvertedBytes + (3 * segments + 1) * 4;
  }
  // Offset in a stage's a of a 16-byte chunk of a row, as FP4 copies them: swizzled, row-major.
  static DGMOE_HD constexpr int row_major(int row, int chunk) {
    return row * kBlockK + (chunk ^ row % 8) * 16;
  }
  // The same in core matrices: one half of a group of columns.
  static DGMOE_HD constexpr int core_matrix(int row, int group, int half) {
    return ((row / 8 * kGroups + group) * 2 + half) * kCoreBytes + row % 8 * 16;
  }
};

namespace sm90 {
namespace mx_small_m {

// Rows of a segment; those of a contiguous one in whole tiles.
template <int kBlockM>
__device__ __forceinline__ int32_t rows_of(const MxSmallMPlan& p, int32_t segment) {
  if (segment >= p.segments()) return 0;
  if (p.masked) return static_cast<int32_t>(valid_rows(p, p.info[segment]));
  const int64_t first = int64_t{segment} * kMxSegment;
  int32_t rows = 0;
  while (rows < kMxSegment && first + rows < p.m && p.info[first + rows] >= 0) {
    rows += kBlockM;
  }
  return static_cast<int32_t>(first + rows < p.m ? rows : p.m - first);
}

// The segments that have rows, in order, in shared memory.
struct SegmentList {
  int32_t *rows, *first_tile;  // the latter has one entry more: the number of tiles
  uint16_t *segment, *expert;
  int32_t tiles;
};

template <int kBlockM>
__device__ __forceinline__ SegmentList list_segments(const MxSmallMPlan& p, int32_t* memory) {
  constexpr int kWarps = kSmallMThreads / 32;
  __shared__ int32_t warp_sums[2][kWarps];
  const int32_t segments = p.segments();
  const int32_t slice = (segments + kSmallMThreads - 1) / kSmallMThreads;
  const int32_t first = static_cast<int32_t>(threadIdx.x) * slice;
  const int32_t n_tiles = (p.n + kSmallMBlockN - 1) / kSmallMBlockN;
  int32_t tiles = 0;
  int32_t count = 0;
#pragma unroll 1
  for (int32_t segment = first; segment < first + slice; ++segment) {
    const int32_t rows = rows_of<kBlockM>(p, segment);
    tiles += (rows + kBlockM - 1) / kBlockM * n_tiles;
    count += rows > 0;
  }
  uint16_t* const halves = reinterpret_cast<uint16_t*>(memory + 2 * segments + 1);
  SegmentList list{memory, memory + segments, halves, halves + segments, 0};
  int32_t length;
  int32_t at = block_exclusive_sum(count, warp_sums[0], kWarps, length);
  int32_t tile = block_exclusive_sum(tiles, warp_sums[1], kWarps, list.tiles);
#pragma unroll 1
  for (int32_t segment = first; segment < first + slice && count > 0; ++segment) {
    const int32_t rows = rows_of<kBlockM>(p, segment);
    if (rows == 0) continue;
    const int32_t expert = p.masked ? segment : p.info[int64_t{segment} * kMxSegment];
    list.segment[at] = static_cast<uint16_t>(segment);
    list.expert[at] = static_cast<uint16_t>(expert);
    list.rows[at] = rows;
    list.first_tile[at++] = tile;
    tile += (rows + kBlockM - 1) / kBlockM * n_tiles;
  }
  if (threadIdx.x == 0) list.first_tile[length] = list.tiles;
  __syncthreads();
  return list;
}

// Where a tile's results go.
struct OutputTile {
  int64_t row;      // the first row of d
  int32_t first_n;  // the first column of d
  int32_t rows;     // from the first on, to the segment's end
};

// The CTA's current tile and K block as the loads see them, some stages ahead of the mainloop.
// Tiles blockIdx.x, blockIdx.x + gridDim.x, ... are the CTA's.
template <typename Config>
struct LoadScheduler {
  int32_t tile, entry, k_block;
  int32_t expert;
  int64_t scale_row;  // the first row in the expert's scales of a
  OutputTile output;

  __device__ LoadScheduler() : tile(blockIdx.x), entry(0), k_block(0) {}

  // M blocks of the same rows of the weight are neighbours, so that those come from L2.
  __device__ __forceinline__ void fetch_tile(const MxSmallMPlan& p, const SegmentList& list) {
    while (list.first_tile[entry + 1] <= tile) ++entry;
    const int32_t rows = list.rows[entry];
    const int32_t m_blocks = (rows + Config::kBlockM - 1) / Config::kBlockM;
    const int32_t local = tile - list.first_tile[entry];
    const int32_t n_block = m_blocks == 1 ? local : local / m_blocks;
    const int32_t first_row = (local - n_block * m_blocks) * Config::kBlockM;
    const int32_t segment = list.segment[entry];
    const int64_t base = p.masked ? segment * p.m : int64_t{segment} * kMxSegment;
    output = {base + first_row, n_block * kSmallMBlockN, rows - first_row};
    scale_row = (p.masked ? 0 : base) + first_row;
    expert = list.expert[entry];
  }
};

}  // namespace mx_small_m
}  // namespace sm90
}  // namespace dgmoe
