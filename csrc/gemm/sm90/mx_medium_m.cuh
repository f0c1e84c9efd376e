// The grouped GEMM of the MX recipes where an expert has neither few rows nor many: bound by the
// weights' way from memory, and nearly as much by the fp32 instructions that scale products.
//
// A pair of blocks takes 256 rows of a weight, one half each, and up to 128 rows of a, in steps of 128
// columns. The tensor core multiplies 32 columns at a time, e4m3 by e4m3: one group of b, whose scale
// and that of a are applied to the partial product in fp32. Nothing is rounded that mx_small_m.cuh does
// not round; but here a weight comes once for up to 128 rows.
//
// A first kernel prepares the rows of a, in the order in which the second one copies them to shared
// memory, and lists the tiles. In the second one two groups of four warps multiply 64 rows of the
// weight each, from registers. A third group copies some steps ahead, and across the ends of tiles:
// weights for its own block, and half the rows of a for both.
//
// FP4: a lane's eight codes of a group stand in one word of a row; the even ones become one register
// of the left operand, the odd ones another, and the columns of a are parted likewise.
#pragma once

#include "mx_medium_m_mma.cuh"
#include "mx_medium_m_prepare.cuh"

namespace dgmoe {
namespace mx_medium_m {

// Where a warp is, from tile to tile: the stage that it reads.
template <bool kFp4, bool kGranK32>
struct Place : Ring<MxMediumMConfig<kFp4, kGranK32>> {
  using Shape = MxMediumMConfig<kFp4, kGranK32>;
  uint32_t weights, right, scales, factors;  // of the first stage

  __device__ __forceinline__ Place(uint32_t memory, int group) : Ring<Shape>(memory) {
    const int lane = threadIdx.x % 32;
    const int first = group * 64 + threadIdx.x % 128 / 32 * 16;
    // Lanes 0 to 7 address rows 0 to 7 of the first matrix, and so on: rows 8 to 15, then the next
    // 16 bytes of both.
    weights = kept(memory + Shape::kWeights + Shape::place(first + lane % 16, lane / 16));
    right = kept(low_descriptor(memory));
    scales = kept(memory + Shape::kScales + (first + lane / 4) * 4);
    factors = kept(memory + Shape::kFactors + Shape::factor(lane % 4 * 2, 0));
  }
  // Of the lane's two rows of the weight: the factor of the group that its number in four says.
  __device__ __forceinline__ void load_factor(float (&mine)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mine[i] = power(load_word(scales + this->slot * Shape::kScaleBytes + i * 32),
                      static_cast<int>(threadIdx.x % 4));
    }
  }
  // 32 bytes of rows: of FP4 two groups of columns, of FP8 one.
  __device__ __forceinline__ void load(uint32_t (&words)[4], int part) const {
    load_matrices(words, (weights ^ part * 32) + this->slot * Shape::kStageBytes);
  }
  // Of two rows of a in the i-th eight of a group.
  __device__ __forceinline__ float2 row_factors(int i, int group) const {
    return load_pair(factors + this->slot * Shape::kFactorBytes + Shape::factor(i * 8, group));
  }
};

// A group's part of a tile of up to kRows rows; goes on to the next tile. More than 80 rows are two
// halves, one after the other. Some products are always under way, until a step ends: the oldest is
// waited for, scaled and added up, and another takes its place.
template <bool kFp4, bool kGranK32, int kRows>
__device__ __forceinline__ void multiply_tile(const Tiles<kMediumMBlocksM>& tiles, uint32_t memory,
                                              int group, Place<kFp4, kGranK32>& place, Tile& tile) {
  using Shape = MxMediumMConfig<kFp4, kGranK32>;
  constexpr int kHalves = kRows > 80 ? 2 : 1;
  constexpr int kWide = kRows / kHalves;
  constexpr int kWideOn = kWide * kMediumMBlockK / 16;  // in 16 bytes, as descriptors count
  // As many as there are registers for.
  constexpr int kDeep = kWide <= 48 ? 4 : kRows == 64 ? (kGranK32 ? 4 : 3) : 2;
  constexpr int kLefts = kHalves == 2 ? 4 : kDeep;  // of left operands
  constexpr int kProducts = 4 * kHalves;            // of a step

  float sums[kRows / 2] = {};
  float parts[kDeep][kWide / 2];
  float inner[kGranK32 ? 1 : kWide / 2];  // of a step, where a has one scale for all of it
  uint32_t left[kLefts][4];
  uint32_t codes[4];
  float mine[2];
  uint32_t right;
  const int first_lane = threadIdx.x % 32 / 4 * 4;

  const auto load = [&](int g) {  // the left operand of a group
    if constexpr (kFp4) {
      if (g % 2 == 0) place.load(codes, g / 2);
      unpack(left[g % kLefts], codes[g % 2 * 2], codes[g % 2 * 2 + 1]);
    } else {
      place.load(left[g % kLefts], g);
    }
    if (g == 3) done_reading(place.slot);
  };
  const auto begin = [&](int n) {
    const int g = n % 4;
    if (n < 4) load(g);
    begin_products();
    multiply<kWide>(parts[n % kDeep], left[g % kLefts],
                    descriptor(right + n / 4 * kWideOn + g * 2));
    commit_products();
  };
#pragma unroll 1
  for (int32_t step = tiles.p.k / kMediumMBlockK; step > 0; --step) {
    place.wait();
    place.load_factor(mine);
    right = uniform(place.right + place.slot * (Shape::kStageBytes / 16));
#pragma unroll
    for (int n = 0; n < kDeep; ++n) begin(n);
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
      const int g = n % 4;
      const int h = n / 4;
      const float low = __shfl_sync(0xffffffffu, mine[0], first_lane + g);
      const float high = __shfl_sync(0xffffffffu, mine[1], first_lane + g);
      float (&part)[kWide / 2] = parts[n % kDeep];
      switch (min(kProducts - 1 - n, kDeep - 1)) {  // how many are under way after it
        case 0:
          wait_products<0>();
          break;
        case 1:
          wait_products<1>();
          break;
        case 2:
          wait_products<2>();
          break;
        default:
          wait_products<3>();
      }
      keep(part);
      if (h == kHalves - 1) keep(left[g % kLefts]);
#pragma unroll
      for (int t = 0; t < kWide / 8; ++t) {
        float2 rows;
        if (kGranK32 || g == 3) rows = place.row_factors(h * (kWide / 8) + t, g);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int i = 4 * t + q;
          const float weight = q < 2 ? low : high;
          const float row = q % 2 == 0 ? rows.x : rows.y;
          float& sum = sums[h * (kWide / 2) + i];
          if constexpr (kGranK32) {
            sum = fused_multiply_add(part[i] * weight, row, sum);
          } else {
            inner[i] = g == 0 ? part[i] * weight : fused_multiply_add(part[i], weight, inner[i]);
            if (g == 3) sum = fused_multiply_add(inner[i], row, sum);
          }
        }
      }
      if (n + kDeep < kProducts) begin(n + kDeep);
    }
    __syncwarp();  // all lanes have read the rows' factors
    place.release(place.slot);
    place.advance();
  }
  const Tile now = tile;
  tile = tiles.after(now);
  write_tile<kRows>(tiles.p, now, group, memory + Shape::kResult, sums, kFp4 ? 64.0f : 1.0f);
}

template <bool kFp4, bool kGranK32>
__device__ __forceinline__ void multiply_rows(const Tiles<kMediumMBlocksM>& tiles, uint32_t memory,
                                              int group) {
  Place<kFp4, kGranK32> place(memory, group);
  Tile tile = tiles.begin();
  while (tiles.there(tile)) {
    if (tile.rows > 96) {
      multiply_tile<kFp4, kGranK32, 128>(tiles, memory, group, place, tile);
    } else if (tile.rows > 80) {
      multiply_tile<kFp4, kGranK32, 96>(tiles, memory, group, place, tile);
    } else if (tile.rows > 64) {
      multiply_tile<kFp4, kGranK32, 80>(tiles, memory, group, place, tile);
    } else if (tile.rows > 48) {
      multiply_tile<kFp4, kGranK32, 64>(tiles, memory, group, place, tile);
    } else if (tile.rows > 32) {
      multiply_tile<kFp4, kGranK32, 48>(tiles, memory, group, place, tile);
    } else {
      multiply_tile<kFp4, kGranK32, 32>(tiles, memory, group, place, tile);
    }
  }
}

// One thread copies rows of a.
template <bool kFp4, bool kGranK32>
__device__ __forceinline__ void copy_rows(const Tiles<kMediumMBlocksM>& tiles, uint32_t memory) {
  using Shape = MxMediumMConfig<kFp4, kGranK32>;
  constexpr int kPrepared = medium_m_prepared_bytes(kGranK32);
  const MxClusterPlan& p = tiles.p;
  const int32_t steps = p.k / kMediumMBlockK;
  mx_cluster::copy_rows<Shape>(
      tiles, memory, [&](const Tile& tile, int32_t step, int slot, uint32_t full, int32_t rows) {
        constexpr int kFactorsOn = 4 * Shape::kRowFactors;
        const uint8_t* from = p.rows + (int64_t{tile.m_block} * steps + step) * kPrepared;
        const int32_t begin = rows * tiles.block;
        barrier_expect(full, rows * 2 * (kMediumMBlockK + kFactorsOn));
        copy_to_pair(memory + slot * Shape::kStageBytes + begin * kMediumMBlockK,
                     from + begin * kMediumMBlockK, rows * kMediumMBlockK, full);
        copy_to_pair(memory + Shape::kFactors + slot * Shape::kFactorBytes + begin * kFactorsOn,
                     from + kMediumMBlockBytes + begin * kFactorsOn, rows * kFactorsOn, full);
      });
}

}  // namespace mx_medium_m

template <bool kFp4, bool kGranK32>
__global__ void __launch_bounds__(kPrepareThreads)
    sm90_mx_medium_m_prepare_kernel(const __grid_constant__ MxClusterPlan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ mx_cluster::ListMemory memory;
  extern __shared__ int32_t first_m_blocks[];  // masked only
  mx_cluster::prepare_m_blocks<kMediumMBlocksM>(
      p, memory, first_m_blocks, [&](const mx_cluster::Tile& m_block, int slice) {
        if (m_block.rows > slice * kSliceM)
          mx_medium_m::prepare_rows<kFp4, kGranK32>(p, m_block, slice);
      });
#endif
}

template <bool kFp4, bool kGranK32>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kCtaThreads, 1)
    sm90_mx_medium_m_kernel(const __grid_constant__ MxClusterPlan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = MxMediumMConfig<kFp4, kGranK32>;
  extern __shared__ uint8_t raw_memory[];
  const uint32_t memory = (shared_address(raw_memory) + 1023) & ~1023u;
  const mx_cluster::Tiles<kMediumMBlocksM> tiles{p};
  mx_cluster::run_block<Shape>(
      memory, [&](int group) { mx_medium_m::multiply_rows<kFp4, kGranK32>(tiles, memory, group); },
      [&](int thread) { mx_cluster::copy_weights<Shape>(tiles, memory, thread); },
      [&] { mx_medium_m::copy_rows<kFp4, kGranK32>(tiles, memory); });
#endif
}

}  // namespace dgmoe
