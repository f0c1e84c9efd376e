// Of some_rows.cuh: its stages in shared memory, and how rows of a are prepared.
#pragma once

#include "pair_block.cuh"

namespace dgmoe {

constexpr int kSomeRowsUnits = 1;  // of rows of a, of a tile
constexpr int kSomeRowsColumns = 128;
constexpr int kSomeRowsBytes = kPairUnit * kSomeRowsColumns;  // of a unit's values in a step

// Bytes of a unit of rows in a step: its values, and after them the scales as factors, in fp32.
DGMOE_HD constexpr int some_rows_prepared(bool narrow) {
  return kSomeRowsBytes + kPairUnit * 4 * (narrow ? 4 : 1);
}

template <bool kFp4, bool kNarrow>
struct SomeRowsShape {
  static constexpr int kColumns = kSomeRowsColumns;
  static constexpr int kRowBytes = kFp4 ? 64 : 128;  // of a weight's row in a step
  static constexpr int kRowFactors = kNarrow ? 4 : 1;
  static constexpr int kFactorBytes = kPairUnit * 4 * kRowFactors;
  static constexpr int kWeights = kSomeRowsBytes;  // they follow rows of a
  static constexpr int kStageBytes = kWeights + kPairBlock * kRowBytes;
  static constexpr int kStages = kFp4 ? 8 : 6;
  static constexpr int kScaleBytes = kPairBlock * 4;  // of the weights, of a stage
  static constexpr int kFactors = kStages * kStageBytes;
  static constexpr int kScales = kFactors + kStages * kFactorBytes;
  static constexpr int kResult = kScales + kStages * kScaleBytes;
  static constexpr int kFull = kResult + pairs::kResultBytes;  // barriers
  static constexpr int kEmpty = kFull + kStages * 8;  // of rows of a; for weights there are others
  static constexpr int kBytes = 1024 + kEmpty + kStages * 8;

  // Of 16 bytes of a weight's row in a stage: eight of a column meet all banks.
  static DGMOE_HD constexpr int place(int row, int chunk) {
    return row * kRowBytes + (kFp4 ? chunk ^ row / 2 % 4 : chunk ^ row % 8) * 16;
  }
  // Of a row's factor: those of rows 2i and 2i + 1 stand beside each other.
  static DGMOE_HD constexpr int factor(int row, int group) {
    return kNarrow ? (row / 2 * 4 + group) * 8 + row % 2 * 4 : row * 4;
  }
};

namespace some_rows {

using namespace pairs;

// Prepares a slice of a unit: 32 of its rows, of which a warp has 8, in the order in which the tensor
// core reads them. A lane has a group of 32 columns at once.
template <bool kFp4, bool kNarrow>
__device__ __forceinline__ void prepare_rows(const PairPlan& p, const Tile& tile, int slice) {
  using Shape = SomeRowsShape<kFp4, kNarrow>;
  constexpr int kAtOnce = 2;
  constexpr int kPrepared = some_rows_prepared(kNarrow);
  const int lane = threadIdx.x % 32;
  const int c = lane % 4;
  const int at = slice * kPairStep + threadIdx.x / 32 * 8 + lane / 4;  // in the unit
  const int32_t row = min(at, tile.rows - 1);
  const int32_t steps = p.k / kSomeRowsColumns;
  const auto* values = reinterpret_cast<const uint4*>(p.a + (tile.row + row) * p.k) + 2 * c;
  const int32_t* scales = p.a_scale + (p.masked ? tile.expert * p.a_scale_batch : 0) +
                          (tile.scale_row + row) * p.a_scale_row;
  uint8_t* to = p.rows + int64_t{tile.unit} * steps * kPrepared;
  for (int32_t step = 0; step < steps; step += kAtOnce) {
    uint4 raw[kAtOnce][2];
    uint32_t words[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int32_t now = min(step + j, steps - 1);
      raw[j][0] = __ldg(values + now * (kSomeRowsColumns / 16));
      raw[j][1] = __ldg(values + now * (kSomeRowsColumns / 16) + 1);
      words[j] = __ldg(scales + (kNarrow ? now : now / 4) * p.a_scale_word);
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
      auto* const chunks = reinterpret_cast<uint4*>(to + at * kSomeRowsColumns);
      chunks[2 * c ^ at % 8] = x;
      chunks[(2 * c + 1) ^ at % 8] = y;
      if (kNarrow || c == 0) {
        *reinterpret_cast<float*>(to + kSomeRowsBytes + Shape::factor(at, c)) =
            power(words[j], kNarrow ? c : (step + j) % 4);
      }
      to += kPrepared;
    }
  }
}

}  // namespace some_rows
}  // namespace dgmoe
