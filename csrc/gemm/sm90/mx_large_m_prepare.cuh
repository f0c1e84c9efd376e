// Of sm90_mx_large_m: its configuration, and the preparation of rows of a.
#pragma once

#include "epilogue.cuh"
#include "mx_large_m_dequant.cuh"
#include "pipeline.cuh"
#include "prepare.cuh"

namespace dgmoe {

constexpr int kLargeMBlocksM = 2;  // M blocks of a tile, at most
constexpr int kLargeMBlockK = 64;
constexpr int kLargeMBlockBytes = kBlockM * kLargeMBlockK * 2;  // of an M block in a K block

template <bool kFp4>
struct MxLargeMConfig {
  static constexpr int kBlockK = kLargeMBlockK;
  static constexpr int kRowBytes = kFp4 ? 32 : 64;  // of a row of the weight in a stage
  static constexpr int kScaleBytes = 0;             // the weights' scales go to registers
  static constexpr int kStages = 5;
  // Offsets: a at the start of a stage, then the weights; after all stages the epilogue's staging
  // and the mbarriers.
  static constexpr int kWeights = kLargeMBlocksM * kLargeMBlockBytes;
  static constexpr int kStageBytes = kWeights + kBlockN * kRowBytes;
  static constexpr int kStaging = kStages * kStageBytes;
  static constexpr int kFull = kStaging + sm90::kEpilogueBytes;
  static constexpr int kEmpty = kFull + kStages * 8;
  static constexpr int kBytes = 1024 + kEmpty + kStages * 8;  // 1024: to align the swizzle atoms

  // Offset of a 16-byte chunk of a row of the weight.
  static DGMOE_HD constexpr int weight_offset(int row, int chunk) {
    return row * kRowBytes + chunk * 16;
  }
};

namespace sm90 {
namespace mx_large_m {

// Dequantises a slice of an M block, 8 rows a warp and some K blocks at a time, in the 128-byte
// swizzle that wgmma reads. The order of columns within a K block is free: it is that in which a
// lane's packed weights become the fragments of four wgmmas.
template <bool kFp4, bool kGranK32>
__device__ __forceinline__ void prepare_rows(const MxClusterPlan& p, const WorkTile& tile,
                                             int slice, uint8_t* staging) {
  constexpr int kAtOnce = 4;
  constexpr int kSpan = kGranK32 ? 2 : 8;  // K blocks of a word of scales
  constexpr int kWords = kAtOnce > kSpan ? kAtOnce / kSpan : 1;
  constexpr int kPart = 8 * kLargeMBlockK * 2;  // bytes of a warp's rows in a K block
  const int lane = threadIdx.x % 32;
  const int c = lane % 4;
  const int r = lane / 4;
  const int first = slice * kSliceM + threadIdx.x / 32 * 8;
  const uint32_t row = min(first + r, tile.rows - 1);
  const int32_t k_blocks = p.k / kLargeMBlockK;
  const auto* values = reinterpret_cast<const uint4*>(p.a + (tile.row + row) * p.k) + c;
  const int32_t* scales = p.a_scale + (p.masked ? tile.expert * p.a_scale_batch : 0) +
                          (tile.scale_row + row) * p.a_scale_row;
  uint8_t* mine = staging + threadIdx.x / 32 * kAtOnce * kPart;
  uint8_t* to =
      p.rows + int64_t{tile.m_block} * k_blocks * kLargeMBlockBytes + first * 128 + lane * 16;
  uint32_t largest = 0;
  bool needs_fallback = false;
  for (int32_t k_block = 0; k_block < k_blocks; k_block += kAtOnce) {
    uint4 raw[kAtOnce];
    uint32_t words[kWords];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      raw[j] = __ldg(values + min(k_block + j, k_blocks - 1) * 4);
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const int32_t word = min(k_block / kSpan + j, (k_blocks - 1) / kSpan);
      words[j] = __ldg(scales + word * p.a_scale_word);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const uint32_t word = words[j / kSpan];
      const int byte = kGranK32 ? j % 2 * 2 + c / 2 : (k_block + j) / 2 % 4;
      uint32_t pairs[8];
      uint4 v = raw[j];
      needs_fallback |= k_block + j < k_blocks && out_of_range(word) &&
                        needs_scale(word, byte, (v.x | v.y | v.z | v.w) & 0x7f7f7f7fu);
      if constexpr (kFp4) {
        v = make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                       __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632));
      }
      const uint32_t factor = factor_of(word, selector_of(byte));
      dequant_e4m3(v.x, factor, pairs[0], pairs[1], largest);
      dequant_e4m3(v.y, factor, pairs[2], pairs[3], largest);
      dequant_e4m3(v.z, factor, pairs[4], pairs[5], largest);
      dequant_e4m3(v.w, factor, pairs[6], pairs[7], largest);
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        *reinterpret_cast<uint32_t*>(mine + j * kPart + r * 128 + ((q ^ r) << 4) + c * 4) =
            pairs[q];
      }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (k_block + j < k_blocks) {
#pragma unroll
        for (int i = 0; i < kPart; i += 32 * 16) {
          *reinterpret_cast<uint4*>(to + int64_t{k_block + j} * kLargeMBlockBytes + i) =
              *reinterpret_cast<const uint4*>(mine + j * kPart + lane * 16 + i);
        }
      }
    }
    __syncwarp();
  }
  const int any = __syncthreads_or(needs_fallback || has_nan(largest));
  if (threadIdx.x == 0) p.flags[tile.m_block * kSlicesPerBlockM + slice] = any;
}

}  // namespace mx_large_m
}  // namespace sm90
}  // namespace dgmoe
