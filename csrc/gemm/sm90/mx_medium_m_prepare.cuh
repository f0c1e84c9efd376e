// Of mx_medium_m.cuh: its stages in shared memory, and how rows of a are prepared.
#pragma once

#include "pipeline.cuh"

namespace dgmoe {

constexpr int kMediumMBlocksM = 1;  // of rows of a, of a tile
constexpr int kMediumMBlockK = 128;
constexpr int kMediumMBlockBytes = kBlockM * kMediumMBlockK;  // of a m_block's values in a step

// Bytes of a m_block of rows in a step: its values, and after them the scales as factors, in fp32.
DGMOE_HD constexpr int medium_m_prepared_bytes(bool gran_k32) {
  return kMediumMBlockBytes + kBlockM * 4 * (gran_k32 ? 4 : 1);
}

template <bool kFp4, bool kGranK32>
struct MxMediumMConfig {
  static constexpr int kColumns = kMediumMBlockK;
  static constexpr int kRowBytes = kFp4 ? 64 : 128;  // of a weight's row in a step
  static constexpr int kRowFactors = kGranK32 ? 4 : 1;
  static constexpr int kFactorBytes = kBlockM * 4 * kRowFactors;
  static constexpr int kWeights = kMediumMBlockBytes;  // they follow rows of a
  static constexpr int kStageBytes = kWeights + kBlockN * kRowBytes;
  static constexpr int kStages = kFp4 ? 8 : 6;
  static constexpr int kScaleBytes = kBlockN * 4;  // of the weights, of a stage
  static constexpr int kFactors = kStages * kStageBytes;
  static constexpr int kScales = kFactors + kStages * kFactorBytes;
  static constexpr int kResult = kScales + kStages * kScaleBytes;
  static constexpr int kFull = kResult + mx_cluster::kResultBytes;  // barriers
  static constexpr int kEmpty = kFull + kStages * 8;  // of rows of a; for weights there are others
  static constexpr int kBytes = 1024 + kEmpty + kStages * 8;

  // Of 16 bytes of a weight's row in a stage: eight of a column meet all banks.
  static DGMOE_HD constexpr int place(int row, int chunk) {
    return row * kRowBytes + (kFp4 ? chunk ^ row / 2 % 4 : chunk ^ row % 8) * 16;
  }
  // Of a row's factor: those of rows 2i and 2i + 1 stand beside each other.
  static DGMOE_HD constexpr int factor(int row, int group) {
    return kGranK32 ? (row / 2 * 4 + group) * 8 + row % 2 * 4 : row * 4;
  }
};

namespace mx_medium_m {

using namespace mx_cluster;

// Prepares a slice of a m_block: 32 of its rows, of which a warp has 8, in the order in which the tensor
// core reads them. A lane has a group of 32 columns at once.
template <bool kFp4, bool kGranK32>
__device__ __forceinline__ void prepare_rows(const MxClusterPlan& p, const Tile& tile, int slice) {
  using Shape = MxMediumMConfig<kFp4, kGranK32>;
  constexpr int kAtOnce = 2;
  constexpr int kPrepared = medium_m_prepared_bytes(kGranK32);
  const int lane = threadIdx.x % 32;
  const int c = lane % 4;
  const int at = slice * kSliceM + threadIdx.x / 32 * 8 + lane / 4;  // in the m_block
  const int32_t row = min(at, tile.rows - 1);
  const int32_t steps = p.k / kMediumMBlockK;
  const auto* values = reinterpret_cast<const uint4*>(p.a + (tile.row + row) * p.k) + 2 * c;
  const int32_t* scales = p.a_scale + (p.masked ? tile.expert * p.a_scale_batch : 0) +
                          (tile.scale_row + row) * p.a_scale_row;
  uint8_t* to = p.rows + int64_t{tile.m_block} * steps * kPrepared;
  for (int32_t step = 0; step < steps; step += kAtOnce) {
    uint4 raw[kAtOnce][2];
    uint32_t words[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int32_t now = min(step + j, steps - 1);
      raw[j][0] = __ldg(values + now * (kMediumMBlockK / 16));
      raw[j][1] = __ldg(values + now * (kMediumMBlockK / 16) + 1);
      words[j] = __ldg(scales + (kGranK32 ? now : now / 4) * p.a_scale_word);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (step + j >= steps) break;
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
        *reinterpret_cast<float*>(to + kMediumMBlockBytes + Shape::factor(at, c)) =
            power(words[j], kGranK32 ? c : (step + j) % 4);
      }
      to += kPrepared;
    }
  }
}

}  // namespace mx_medium_m
}  // namespace dgmoe
