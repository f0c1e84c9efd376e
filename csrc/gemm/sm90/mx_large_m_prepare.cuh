// Of mx_large_m.cuh: its stages in shared memory, and how rows of a are widened.
#pragma once

#include "mx_large_m_mma.cuh"
#include "pipeline.cuh"

namespace dgmoe {

constexpr int kLargeMBlocksM = 2;  // of rows of a, of a tile
constexpr int kLargeMBlockK = 64;
constexpr int kLargeMBlockBytes = kBlockM * kLargeMBlockK * 2;  // of a m_block in a step

template <bool kFp4>
struct MxLargeMConfig {
  static constexpr int kColumns = kLargeMBlockK;
  static constexpr int kRowBytes = kFp4 ? 32 : 64;  // of a weight's row in a step
  static constexpr int kWeights = kLargeMBlocksM * kLargeMBlockBytes;  // they follow rows of a
  static constexpr int kStageBytes = kWeights + kBlockN * kRowBytes;
  static constexpr int kStages = 5;
  static constexpr int kScaleBytes = 0;  // they go to registers
  static constexpr int kResult = kStages * kStageBytes;
  static constexpr int kFull = kResult + mx_cluster::kResultBytes;  // barriers
  static constexpr int kEmpty = kFull + kStages * 8;  // of rows of a; for weights there are others
  static constexpr int kBytes = 1024 + kEmpty + kStages * 8;

  // Of 16 bytes of a weight's row in a stage.
  static DGMOE_HD constexpr int place(int row, int chunk) { return row * kRowBytes + chunk * 16; }
};

namespace mx_large_m {

using namespace mx_cluster;

// Widens a slice of a m_block: 32 of its rows, of which a warp has 8, in some steps at once.
template <bool kFp4, bool kGranK32>
__device__ __forceinline__ void widen_rows(const MxClusterPlan& p, const Tile& tile, int slice,
                                           uint8_t* memory) {
  constexpr int kAtOnce = 4;
  constexpr int kSpan = kGranK32 ? 2 : 8;  // steps of a word of scales
  constexpr int kWords = kAtOnce > kSpan ? kAtOnce / kSpan : 1;
  constexpr int kPart = 8 * kLargeMBlockK * 2;  // bytes of a warp's rows in a step
  const int lane = threadIdx.x % 32;
  const int c = lane % 4;
  const int r = lane / 4;
  const int first = slice * kSliceM + threadIdx.x / 32 * 8;
  const uint32_t row = min(first + r, tile.rows - 1);
  const int32_t steps = p.k / kLargeMBlockK;
  const auto* values = reinterpret_cast<const uint4*>(p.a + (tile.row + row) * p.k) + c;
  const int32_t* scales = p.a_scale + (p.masked ? tile.expert * p.a_scale_batch : 0) +
                          (tile.scale_row + row) * p.a_scale_row;
  uint8_t* mine = memory + threadIdx.x / 32 * kAtOnce * kPart;
  uint8_t* to =
      p.rows + int64_t{tile.m_block} * steps * kLargeMBlockBytes + first * 128 + lane * 16;
  uint32_t largest = 0;
  bool bad = false;
  for (int32_t step = 0; step < steps; step += kAtOnce) {
    uint4 raw[kAtOnce];
    uint32_t words[kWords];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      raw[j] = __ldg(values + min(step + j, steps - 1) * 4);
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const int32_t word = min(step / kSpan + j, (steps - 1) / kSpan);
      words[j] = __ldg(scales + word * p.a_scale_word);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const uint32_t word = words[j / kSpan];
      const int byte = kGranK32 ? j % 2 * 2 + c / 2 : (step + j) / 2 % 4;
      uint32_t pairs[8];
      uint4 v = raw[j];
      bad |= step + j < steps && out_of_range(word) &&
             needs_scale(word, byte, (v.x | v.y | v.z | v.w) & 0x7f7f7f7fu);
      if constexpr (kFp4) {
        v = make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                       __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632));
      }
      const uint32_t factor = factor_of(word, selector_of(byte));
      widen_e4m3(v.x, factor, pairs[0], pairs[1], largest);
      widen_e4m3(v.y, factor, pairs[2], pairs[3], largest);
      widen_e4m3(v.z, factor, pairs[4], pairs[5], largest);
      widen_e4m3(v.w, factor, pairs[6], pairs[7], largest);
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        *reinterpret_cast<uint32_t*>(mine + j * kPart + r * 128 + ((q ^ r) << 4) + c * 4) =
            pairs[q];
      }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (step + j < steps) {
#pragma unroll
        for (int i = 0; i < kPart; i += 32 * 16) {
          *reinterpret_cast<uint4*>(to + int64_t{step + j} * kLargeMBlockBytes + i) =
              *reinterpret_cast<const uint4*>(mine + j * kPart + lane * 16 + i);
        }
      }
    }
    __syncwarp();
  }
  const int any = __syncthreads_or(bad || has_nan(largest));
  if (threadIdx.x == 0) p.flags[tile.m_block * kSlicesPerBlockM + slice] = any;
}

}  // namespace mx_large_m
}  // namespace dgmoe
