// sm90_mx_medium_m: the grouped GEMM of the MX recipes where an expert has more rows than suit
// sm90_mx_small_m and fewer than suit sm90_mx_large_m. It is bound by the bandwidth at which
// weights are read, and nearly as much by the fp32 instructions that promote the products. It
// rounds as sm90_mx_small_m does, but reads a weight once for up to 128 rows.
//
// sm90_mx_medium_m_prepare_kernel runs first: it lists the tiles and writes a in K blocks,
// swizzled, with scales as fp32.
//
// CTA tile         M 128 (N of wgmma 32, 48, 64, 80, 2 x 48 or 2 x 64, by the tile's rows) x N 128,
//                  K 128 a stage
// cluster          2 x 1 x 1: the CTAs share a tile of N 256; 1 CTA an SM, persistent
// stages           6 (FP8) or 8 (FP4)
// warp roles       2 math warpgroups of N 64 each, 1 producer warpgroup (pipeline.cuh)
// operand source   wgmma m64nMk32 e4m3, operands swapped: the weight from registers (ldmatrix; e2m1
//                  unpacked to e4m3 there), a from shared memory with 128-byte swizzle, half of it
//                  multicast by each CTA of the cluster
// scales           in fp32 on the accumulators of each group of 32 columns: one UE8M0 of a weight's
//                  row, then one of a's row for 32 (kGranK32) or 128 columns
// shared memory    FP8 231,520 bytes (kGranK32) or 222,304; FP4 224,384
// registers        168 a thread at launch; 224 math, 56 producers after setmaxnreg
#pragma once

#include "mx_medium_m_prepare.cuh"

namespace dgmoe {
namespace sm90 {
namespace mx_medium_m {

// A math warp's state, and what its lane reads of a stage.
template <bool kFp4, bool kGranK32>
struct MathState : ConsumerState<MxMediumMConfig<kFp4, kGranK32>> {
  using Config = MxMediumMConfig<kFp4, kGranK32>;
  uint32_t weights, a_desc, scales, row_scales;  // of the first stage

  __device__ __forceinline__ MathState(uint32_t memory, int warpgroup)
      : ConsumerState<Config>(memory) {
    const int lane = threadIdx.x % 32;
    const int first = warpgroup * 64 + threadIdx.x % 128 / 32 * 16;
    // Matrices of ldmatrix: rows 0 to 7, rows 8 to 15, then the next 16 bytes of both.
    weights = no_rematerialize(memory + Config::kWeights +
                               Config::weight_offset(first + lane % 16, lane / 16));
    a_desc = no_rematerialize(make_smem_desc_128b_lo(memory));
    scales = no_rematerialize(memory + Config::kScales + (first + lane / 4) * 4);
    row_scales =
        no_rematerialize(memory + Config::kRowScales + Config::row_scale_offset(lane % 4 * 2, 0));
  }
  // Of the lane's two rows of the weight: the scale of one group, lane % 4. The others come by
  // shuffle.
  __device__ __forceinline__ void load_scales(float (&mine)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mine[i] = ue8m0_of_word(ld_shared_b32(scales + this->stage * Config::kScaleBytes + i * 32),
                              static_cast<int>(threadIdx.x % 4));
    }
  }
  // 32 bytes of rows of the weight: for FP4 two groups of columns, for FP8 one.
  __device__ __forceinline__ void load_weights(uint32_t (&words)[4], int part) const {
    ldmatrix_x4(words, (weights ^ part * 32) + this->stage * Config::kStageBytes);
  }
  // Of the lane's two rows of a in the i-th eight, for a group.
  __device__ __forceinline__ float2 load_row_scales(int i, int group) const {
    return ld_shared_v2_f32(row_scales + this->stage * Config::kRowScaleBytes +
                            Config::row_scale_offset(i * 8, group));
  }
};

// The mainloop of a warpgroup over a tile of up to kRows rows, its epilogue, and the step to the
// next tile. More than 80 rows are two halves in N of wgmma. Within a K block kDepth wgmmas are
// pending: the oldest is waited for and promoted, and the next one issued into its registers.
template <bool kFp4, bool kGranK32, int kRows>
__device__ __forceinline__ void math_tile(const TileScheduler<kMediumMBlocksM>& scheduler,
                                          uint32_t memory, int warpgroup,
                                          MathState<kFp4, kGranK32>& state, WorkTile& tile) {
  using Config = MxMediumMConfig<kFp4, kGranK32>;
  constexpr int kHalves = kRows > 80 ? 2 : 1;
  constexpr int kWgmmaN = kRows / kHalves;
  constexpr int kHalfDesc = kWgmmaN * kMediumMBlockK / 16;  // from half to half of a descriptor
  // As deep as there are registers for.
  constexpr int kDepth = kWgmmaN <= 48 ? 4 : kRows == 64 ? (kGranK32 ? 4 : 3) : 2;
  constexpr int kFragments = kHalves == 2 ? 4 : kDepth;
  constexpr int kWgmmas = 4 * kHalves;  // of a K block

  float accum[kRows / 2] = {};
  float partial[kDepth][kWgmmaN / 2];
  float inner[kGranK32 ? 1 : kWgmmaN / 2];  // of a K block, where a has one scale for all of it
  uint32_t fragments[kFragments][4];
  uint32_t codes[4];
  float mine[2];
  uint32_t a_desc;
  const int first_lane = threadIdx.x % 32 / 4 * 4;

  const auto load = [&](int g) {  // the fragment of a group
    if constexpr (kFp4) {
      if (g % 2 == 0) state.load_weights(codes, g / 2);
      e2m1_fragment(fragments[g % kFragments], codes[g % 2 * 2], codes[g % 2 * 2 + 1]);
    } else {
      state.load_weights(fragments[g % kFragments], g);
    }
    if (g == 3) arrive_weights_read(state.stage);
  };
  const auto issue = [&](int n) {
    const int g = n % 4;
    if (n < 4) load(g);
    warpgroup_arrive();
    wgmma_e4m3<kWgmmaN>(partial[n % kDepth], fragments[g % kFragments],
                        make_smem_desc_128b(a_desc + n / 4 * kHalfDesc + g * 2));
    warpgroup_commit_batch();
  };
#pragma unroll 1
  for (int32_t k_block = scheduler.p.k / kMediumMBlockK; k_block > 0; --k_block) {
    state.wait_full();
    state.load_scales(mine);
    a_desc = warp_uniform(state.a_desc + state.stage * (Config::kStageBytes / 16));
#pragma unroll
    for (int n = 0; n < kDepth; ++n) issue(n);
#pragma unroll
    for (int n = 0; n < kWgmmas; ++n) {
      const int g = n % 4;
      const int h = n / 4;
      const float scale = __shfl_sync(0xffffffffu, mine[0], first_lane + g);
      const float scale_8 = __shfl_sync(0xffffffffu, mine[1], first_lane + g);
      float (&part)[kWgmmaN / 2] = partial[n % kDepth];
      switch (min(kWgmmas - 1 - n, kDepth - 1)) {  // how many are pending after it
        case 0:
          warpgroup_wait<0>();
          break;
        case 1:
          warpgroup_wait<1>();
          break;
        case 2:
          warpgroup_wait<2>();
          break;
        default:
          warpgroup_wait<3>();
      }
      warpgroup_fence_operand(part);
      if (h == kHalves - 1) warpgroup_fence_operand(fragments[g % kFragments]);
#pragma unroll
      for (int t = 0; t < kWgmmaN / 8; ++t) {
        float2 row_scales;
        if (kGranK32 || g == 3) row_scales = state.load_row_scales(h * (kWgmmaN / 8) + t, g);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int i = 4 * t + q;
          const float weight_scale = q < 2 ? scale : scale_8;
          const float row_scale = q % 2 == 0 ? row_scales.x : row_scales.y;
          float& sum = accum[h * (kWgmmaN / 2) + i];
          if constexpr (kGranK32) {
            sum = fused_multiply_add(part[i] * weight_scale, row_scale, sum);
          } else {
            inner[i] = g == 0 ? part[i] * weight_scale
                              : fused_multiply_add(part[i], weight_scale, inner[i]);
            if (g == 3) sum = fused_multiply_add(inner[i], row_scale, sum);
          }
        }
      }
      if (n + kDepth < kWgmmas) issue(n + kDepth);
    }
    __syncwarp();  // all lanes have read the scales of a
    state.release(state.stage);
    state.advance();
  }
  const WorkTile now = tile;
  tile = scheduler.next_work(now);
  // FP4's codes were 2^-6 of their values.
  store_tile<kRows>(scheduler.p, now, warpgroup, memory + Config::kStaging, accum,
                    kFp4 ? 64.0f : 1.0f);
}

// A math warpgroup: all tiles, each by the smallest wgmma that holds its rows.
template <bool kFp4, bool kGranK32>
__device__ __forceinline__ void math(const TileScheduler<kMediumMBlocksM>& scheduler,
                                     uint32_t memory, int warpgroup) {
  MathState<kFp4, kGranK32> state(memory, warpgroup);
  WorkTile tile = scheduler.initial_work();
  while (scheduler.is_valid(tile)) {
    if (tile.rows > 96) {
      math_tile<kFp4, kGranK32, 128>(scheduler, memory, warpgroup, state, tile);
    } else if (tile.rows > 80) {
      math_tile<kFp4, kGranK32, 96>(scheduler, memory, warpgroup, state, tile);
    } else if (tile.rows > 64) {
      math_tile<kFp4, kGranK32, 80>(scheduler, memory, warpgroup, state, tile);
    } else if (tile.rows > 48) {
      math_tile<kFp4, kGranK32, 64>(scheduler, memory, warpgroup, state, tile);
    } else if (tile.rows > 32) {
      math_tile<kFp4, kGranK32, 48>(scheduler, memory, warpgroup, state, tile);
    } else {
      math_tile<kFp4, kGranK32, 32>(scheduler, memory, warpgroup, state, tile);
    }
  }
}

// The producer thread of a: values and scales of this CTA's half, to both CTAs.
template <bool kFp4, bool kGranK32>
__device__ __forceinline__ void produce_rows(const TileScheduler<kMediumMBlocksM>& scheduler,
                                             uint32_t memory) {
  using Config = MxMediumMConfig<kFp4, kGranK32>;
  constexpr int kPrepared = medium_m_prepared_bytes(kGranK32);
  const MxClusterPlan& p = scheduler.p;
  const int32_t k_blocks = p.k / kMediumMBlockK;
  load_rows<Config>(
      scheduler, memory,
      [&](const WorkTile& tile, int32_t k_block, int stage, uint32_t full, int32_t rows) {
        constexpr int kScaleBytesPerRow = 4 * Config::kScalesPerRow;
        const uint8_t* from = p.rows + (int64_t{tile.m_block} * k_blocks + k_block) * kPrepared;
        const int32_t begin = rows * scheduler.cta;
        mbarrier_arrive_and_expect_tx(full, rows * 2 * (kMediumMBlockK + kScaleBytesPerRow));
        bulk_copy_g2s_multicast(memory + stage * Config::kStageBytes + begin * kMediumMBlockK,
                                from + begin * kMediumMBlockK, rows * kMediumMBlockK, full, 3);
        bulk_copy_g2s_multicast(memory + Config::kRowScales + stage * Config::kRowScaleBytes +
                                    begin * kScaleBytesPerRow,
                                from + kMediumMBlockBytes + begin * kScaleBytesPerRow,
                                rows * kScaleBytesPerRow, full, 3);
      });
}

}  // namespace mx_medium_m
}  // namespace sm90

template <bool kFp4, bool kGranK32>
__global__ void __launch_bounds__(kPrepareThreads)
    sm90_mx_medium_m_prepare_kernel(const __grid_constant__ MxClusterPlan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ sm90::ListStorage storage;
  extern __shared__ int32_t first_m_blocks[];  // masked only
  sm90::prepare_m_blocks<kMediumMBlocksM>(
      p, storage, first_m_blocks, [&](const sm90::WorkTile& m_block, int slice) {
        if (m_block.rows > slice * kSliceM) {
          sm90::mx_medium_m::prepare_rows<kFp4, kGranK32>(p, m_block, slice);
        }
      });
#endif
}

template <bool kFp4, bool kGranK32>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kCtaThreads, 1)
    sm90_mx_medium_m_kernel(const __grid_constant__ MxClusterPlan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  namespace kernel = sm90::mx_medium_m;
  using Config = MxMediumMConfig<kFp4, kGranK32>;
  extern __shared__ uint8_t raw_memory[];
  const uint32_t memory = (cast_smem_ptr_to_uint(raw_memory) + 1023) & ~1023u;
  const sm90::TileScheduler<kMediumMBlocksM> scheduler{p};
  sm90::run_warp_specialized<Config>(
      memory, [&](int warpgroup) { kernel::math<kFp4, kGranK32>(scheduler, memory, warpgroup); },
      [&](int thread) { sm90::load_weights<Config>(scheduler, memory, thread); },
      [&] { kernel::produce_rows<kFp4, kGranK32>(scheduler, memory); });
#endif
}

}  // namespace dgmoe
