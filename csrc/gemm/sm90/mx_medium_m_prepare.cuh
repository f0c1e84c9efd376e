// Of sm90_mx_medium_m: its configuration, and the preparation of rows of a.
#pragma once

#include "epilogue.cuh"
#include "pipeline.cuh"
#include "prepare.cuh"

namespace dgmoe {

constexpr int kMediumMBlocksM = 1;  // M blocks of a tile
constexpr int kMediumMBlockK = 128;
constexpr int kMediumMBlockBytes = kBlockM * kMediumMBlockK;  // of an M block's values in a K block

// Bytes of an M block in a K block: its values, and after them the scales in fp32.
DGMOE_HD constexpr int medium_m_prepared_bytes(bool gran_k32) {
  return kMediumMBlockBytes + kBlockM * 4 * (gran_k32 ? 4 : 1);
}

template <bool kFp4, bool kGranK32>
struct MxMediumMConfig {
  static constexpr int kBlockK = kMediumMBlockK;
  static constexpr int kRowBytes = kFp4 ? 64 : 128;       // of a row of the weight in a stage
  static constexpr int kScalesPerRow = kGranK32 ? 4 : 1;  // of a, in a stage
  static constexpr int kRowScaleBytes = kBlockM * 4 * kScalesPerRow;
  static constexpr int kScaleBytes = kBlockN * 4;  // of the weights, in a stage
  static constexpr int kStages = kFp4 ? 8 : 6;
  // Offsets: a at the start of a stage, then the weights; after all stages the scales of a, those
  // of the weights, the epilogue's staging and the mbarriers.
  static constexpr int kWeights = kMediumMBlockBytes;
  static constexpr int kStageBytes = kWeights + kBlockN * kRowBytes;
  static constexpr int kRowScales = kStages * kStageBytes;
  static constexpr int kScales = kRowScales + kStages * kRowScaleBytes;
  static constexpr int kStaging = kScales + kStages * kScaleBytes;
  static constexpr int kFull = kStaging + sm90::kEpilogueBytes;
  static constexpr int kEmpty = kFull + kStages * 8;
  static constexpr int kBytes = 1024 + kEmpty + kStages * 8;  // 1024: to align the swizzle atoms

  // Offset of a 16-byte chunk of a row of the weight: swizzled, so that ldmatrix has no bank
  // conflicts.
  static DGMOE_HD constexpr int weight_offset(int row, int chunk) {
    return row * kRowBytes + (kFp4 ? chunk ^ row / 2 % 4 : chunk ^ row % 8) * 16;
  }
  // Offset of a row's scale of a group of 32 columns; those of rows 2i and 2i + 1 are neighbours.
  static DGMOE_HD constexpr int row_scale_offset(int row, int group) {
    return kGranK32 ? (row / 2 * 4 + group) * 8 + row % 2 * 4 : row * 4;
  }
};

namespace sm90 {
namespace mx_medium_m {

// Prepares a slice of an M block, 8 rows a warp: values in the 128-byte swizzle that wgmma reads,
// for FP4 with even and odd columns of a group apart, and scales as fp32. A lane has one group of
// 32 columns of a row at a time.
template <bool kFp4, bool kGranK32>
__device__ __forceinline__ void prepare_rows(const MxClusterPlan& p, const WorkTile& tile,
                                             int slice) {
  using Config = MxMediumMConfig<kFp4, kGranK32>;
  constexpr int kAtOnce = 2;
  constexpr int kPrepared = medium_m_prepared_bytes(kGranK32);
  const int lane = threadIdx.x % 32;
  const int c = lane % 4;
  const int at = slice * kSliceM + threadIdx.x / 32 * 8 + lane / 4;  // in the M block
  const int32_t row = min(at, tile.rows - 1);
  const int32_t k_blocks = p.k / kMediumMBlockK;
  const auto* values = reinterpret_cast<const uint4*>(p.a + (tile.row + row) * p.k) + 2 * c;
  const int32_t* scales = p.a_scale + (p.masked ? tile.expert * p.a_scale_batch : 0) +
                          (tile.scale_row + row) * p.a_scale_row;
  uint8_t* to = p.rows + int64_t{tile.m_block} * k_blocks * kPrepared;
  for (int32_t k_block = 0; k_block < k_blocks; k_block += kAtOnce) {
    uint4 raw[kAtOnce][2];
    uint32_t words[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int32_t now = min(k_block + j, k_blocks - 1);
      raw[j][0] = __ldg(values + now * (kMediumMBlockK / 16));
      raw[j][1] = __ldg(values + now * (kMediumMBlockK / 16) + 1);
      words[j] = __ldg(scales + (kGranK32 ? now : now / 4) * p.a_scale_word);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (k_block + j >= k_blocks) break;
      uint4 x = raw[j][0];
      uint4 y = raw[j][1];
      if constexpr (kFp4) {  // even columns, then odd ones
        const uint4 even = make_uint4(__byte_perm(x.x, x.y, 0x6420), __byte_perm(x.z, x.w, 0x6420),
                                      __byte_perm(y.x, y.y, 0x6420), __byte_perm(y.z, y.w, 0x6420));
        y = make_uint4(__byte_perm(x.x, x.y, 0x7531), __byte_perm(x.z, x.w, 0x7531),
                       __byte_perm(y.x, y.y, 0x7531), __byte_perm(y.z, y.w, 0x7531));
        x = even;
      }
      auto* const chunks = reinterpret_cast<uint4*>(to + at * kMediumMBlockK);
      chunks[2 * c ^ at % 8] = x;
      chunks[(2 * c + 1) ^ at % 8] = y;
      if (kGranK32 || c == 0) {
        *reinterpret_cast<float*>(to + kMediumMBlockBytes + Config::row_scale_offset(at, c)) =
            ue8m0_of_word(words[j], kGranK32 ? c : (k_block + j) % 4);
      }
      to += kPrepared;
    }
  }
}

}  // namespace mx_medium_m
}  // namespace sm90
}  // namespace dgmoe
