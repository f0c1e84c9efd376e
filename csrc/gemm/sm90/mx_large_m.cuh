// sm90_mx_large_m: the grouped GEMM of the MX recipes where an expert has many rows. It is bound by
// the tensor core at its bf16 rate, and next by the instructions that dequantise the weights.
//
// e4m3 and e2m1 values times a power of two are exact in bf16, so the scales are folded into both
// operands, and the accumulators take just one constant in the epilogue. A tile with scales below
// 2^-111 of anything but zero, or above 2^16, or with NaN among scales or values, is computed again
// by its warpgroup, element by element in fp32, without the tensor core.
//
// sm90_mx_large_m_prepare_kernel runs first: it lists the tiles, and writes a in K blocks as bf16,
// swizzled, with flags that say which slices need that fallback.
//
// CTA tile         M 256 (N of wgmma 64, 128, 144, 192 or 256, by the tile's rows) x N 128, K 64 a
//                  stage
// cluster          2 x 1 x 1: the CTAs share a tile of N 256; 1 CTA an SM, persistent
// stages           5
// warp roles       2 math warpgroups of N 64 each, 1 producer warpgroup (pipeline.cuh)
// operand source   wgmma m64nMk16 bf16, operands swapped: the weight from registers, where it is
//                  dequantised once for all rows of a; a from shared memory with 128-byte swizzle,
//                  half of it multicast by each CTA of the cluster
// scales           in both operands before wgmma
// shared memory    FP8 224,336 bytes; FP4 203,856
// registers        168 a thread at launch; 224 math, 56 producers after setmaxnreg
#pragma once

#include <type_traits>

#include "mx_large_m_prepare.cuh"

namespace dgmoe {
namespace sm90 {
namespace mx_large_m {

// One element of d.
template <bool kFp4, bool kGranK32>
__device__ __forceinline__ float fallback_dot(const MxClusterPlan& p, const uint8_t* a,
                                              const int32_t* a_scale, const uint8_t* b,
                                              const int32_t* b_scale) {
  float sum = 0.0f;
  for (int32_t group = 0; group < p.k / 32; ++group) {
    float part = 0.0f;
    for (int32_t i = 0; i < 32; ++i) {
      const int32_t column = group * 32 + i;
      const float x = e4m3_to_float(a[column]);
      const float y =
          kFp4 ? e2m1_to_float(b[column / 2] >> column % 2 * 4 & 15) : e4m3_to_float(b[column]);
      part = fused_multiply_add(x, y, part);
    }
    const int32_t a_group = kGranK32 ? group : group / 4;
    const float a_factor = ue8m0_to_float(static_cast<uint8_t>(
        static_cast<uint32_t>(a_scale[a_group / 4 * p.a_scale_word]) >> a_group % 4 * 8));
    const float b_factor = ue8m0_to_float(static_cast<uint8_t>(
        static_cast<uint32_t>(b_scale[group / 4 * p.b_scale_word]) >> group % 4 * 8));
    sum = fused_multiply_add(part * a_factor, b_factor, sum);
  }
  return sum;
}

// A math warp's state: what its lane reads of a stage, and the scales of its two rows of the
// weight, a word ahead.
template <bool kFp4>
struct MathState : ConsumerState<MxLargeMConfig<kFp4>> {
  using Config = MxLargeMConfig<kFp4>;
  int last_stage;
  const int32_t* scales[2];
  uint32_t next_scales[2];
  uint32_t weights, a_desc;  // of the first stage
  uint32_t selector;
  int row;  // of the CTA's rows of the weight; the lane has row + 8 too

  __device__ __forceinline__ MathState(uint32_t memory, int warpgroup)
      : ConsumerState<Config>(memory) {
    const int lane = threadIdx.x % 32;
    const int c = lane % 4;
    row = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    weights =
        no_rematerialize(memory + Config::kWeights + row * Config::kRowBytes + c * (kFp4 ? 8 : 16));
    a_desc = no_rematerialize(make_smem_desc_128b_lo(memory));
    selector = no_rematerialize(selector_of(c / 2));
  }
  // Loads a tile's first scales, before the epilogue of the tile before.
  __device__ __forceinline__ void prefetch_scales(const TileScheduler<kLargeMBlocksM>& scheduler,
                                                  const WorkTile& tile) {
    if (!scheduler.is_valid(tile)) return;
    const MxClusterPlan& p = scheduler.p;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] = p.b_scale + tile.expert * p.b_scale_batch +
                  min(tile.first_n + row + i * 8, p.n - 1) * p.b_scale_row;
      next_scales[i] = __ldg(scales[i]);
    }
  }
  __device__ __forceinline__ void advance() {
    last_stage = this->stage;
    ConsumerState<Config>::advance();
  }
};

// The producer thread of a: this CTA's half, to both CTAs. The half may span two M blocks.
template <bool kFp4>
__device__ __forceinline__ void produce_rows(const TileScheduler<kLargeMBlocksM>& scheduler,
                                             uint32_t memory) {
  using Config = MxLargeMConfig<kFp4>;
  const MxClusterPlan& p = scheduler.p;
  const int32_t k_blocks = p.k / kLargeMBlockK;
  load_rows<Config>(
      scheduler, memory,
      [&](const WorkTile& tile, int32_t k_block, int stage, uint32_t full, int32_t rows) {
        const uint32_t to = memory + stage * Config::kStageBytes;
        const int32_t half = rows * kLargeMBlockK * 2;
        const int32_t begin = half * scheduler.cta;
        const uint8_t* from =
            p.rows + (int64_t{tile.m_block} * k_blocks + k_block) * kLargeMBlockBytes;
        mbarrier_arrive_and_expect_tx(full, half * 2);
#pragma unroll
        for (int m_block = 0; m_block < kLargeMBlocksM; ++m_block) {
          const int32_t first = max(begin, m_block * kLargeMBlockBytes);
          const int32_t bytes = min(begin + half, (m_block + 1) * kLargeMBlockBytes) - first;
          if (bytes > 0) {
            bulk_copy_g2s_multicast(
                to + first, from + int64_t{m_block} * (k_blocks - 1) * kLargeMBlockBytes + first,
                bytes, full, 3);
          }
        }
      });
}

// The mainloop of a warpgroup over a tile of up to kRows rows, its epilogue, and the step to the
// next tile. Returns whether the tile needs the fallback: then nothing was stored.
template <bool kFp4, int kRows>
__device__ __forceinline__ bool math_tile(const TileScheduler<kLargeMBlocksM>& scheduler,
                                          uint32_t memory, int warpgroup, MathState<kFp4>& state,
                                          WorkTile& tile) {
  using Config = MxLargeMConfig<kFp4>;
  const MxClusterPlan& p = scheduler.p;
  const int32_t k_blocks = p.k / kLargeMBlockK;

  // Initialised: accumulators without values would be live across the code for all tile heights.
  float accum[kRows / 2] = {};
  // Fragments of two wgmmas, which are committed as one batch, and of the next two, which are
  // dequantised while those are pending.
  uint32_t fragments[2][2][4] = {};
  uint32_t words[2] = {};
  uint32_t largest = 0;
  bool needs_fallback = false;
  bool any_out_of_range = false;
  const auto k_block_math = [&](int32_t k_block, int odd) {
    state.wait_full();
    PackedWeights<kFp4> packed[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      packed[i].load(state.weights + state.stage * Config::kStageBytes + i * 8 * Config::kRowBytes);
    }
    arrive_weights_read(state.stage);
    if (any_out_of_range) {
      const int byte = odd * 2 + threadIdx.x % 4 / 2;
      needs_fallback |= needs_scale(words[0], byte, packed[0].magnitudes()) ||
                        needs_scale(words[1], byte, packed[1].magnitudes());
    }
    const uint32_t selector = state.selector + odd * 0x2020;
    const uint32_t a_desc = warp_uniform(state.a_desc + state.stage * (Config::kStageBytes / 16));
    const uint32_t factor = factor_of(words[0], selector);
    const uint32_t factor_8 = factor_of(words[1], selector);
    const auto batch = [&](auto of) {
      constexpr int kBatch = decltype(of)::value;
      auto& set = fragments[kBatch];
      dequant_fragment<kFp4, 2 * kBatch, 0>(packed[0], factor, set[0], largest);
      dequant_fragment<kFp4, 2 * kBatch, 1>(packed[1], factor_8, set[0], largest);
      dequant_fragment<kFp4, 2 * kBatch + 1, 0>(packed[0], factor, set[1], largest);
      dequant_fragment<kFp4, 2 * kBatch + 1, 1>(packed[1], factor_8, set[1], largest);
      warpgroup_arrive();
      wgmma_bf16<kRows>(accum, set[0], make_smem_desc_128b(a_desc + 4 * kBatch));
      wgmma_bf16<kRows>(accum, set[1], make_smem_desc_128b(a_desc + 4 * kBatch + 2));
      warpgroup_commit_batch();
      warpgroup_wait<1>();
    };
    batch(std::integral_constant<int, 0>{});
    if (k_block > 0) state.release(state.last_stage);
    batch(std::integral_constant<int, 1>{});
    state.advance();
  };
  for (int32_t k_block = 0; k_block < k_blocks; k_block += 2) {  // a word of scales each
    any_out_of_range = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[i] = state.next_scales[i];
      any_out_of_range |= out_of_range(words[i]);
      state.scales[i] += p.b_scale_word;
      if (k_block + 2 < k_blocks) state.next_scales[i] = __ldg(state.scales[i]);
    }
    k_block_math(k_block, 0);
    k_block_math(k_block + 1, 1);
  }
  int32_t flag = 0;
#pragma unroll
  for (int i = 0; i < (kRows + kBlockM - 1) / kBlockM * kSlicesPerBlockM; ++i) {
    flag |= p.flags[tile.m_block * kSlicesPerBlockM + i];
  }
  warpgroup_wait<0>();
  state.release(state.last_stage);
  const WorkTile now = tile;
  tile = scheduler.next_work(now);
  state.prefetch_scales(scheduler, tile);

  if (warpgroup_any(warpgroup, needs_fallback || has_nan(largest) || flag != 0)) return true;
  constexpr float kUnscale = kFp4 ? 0x1p24f : 0x1p18f;  // 2^-15 or 2^-9 of b, times 2^-9 of a
  store_tile<kRows>(p, now, warpgroup, memory + Config::kStaging, accum, kUnscale);
  return false;
}

// A warpgroup's part of a tile, element by element.
template <bool kFp4, bool kGranK32>
__device__ __noinline__ void fallback_tile(const MxClusterPlan& p, const WorkTile& tile,
                                           int warpgroup) {
  const int thread = threadIdx.x % 128;
  const int32_t row = tile.first_n + warpgroup * 64 + thread / 2;
  if (row >= p.n) return;
  const uint8_t* b = p.b + (int64_t{tile.expert} * p.n + row) * (kFp4 ? p.k / 2 : p.k);
  const int32_t* b_scale = p.b_scale + tile.expert * p.b_scale_batch + row * p.b_scale_row;
  const int32_t* a_scale = p.a_scale + (p.masked ? tile.expert * p.a_scale_batch : 0);
  for (int32_t i = thread % 2; i < tile.rows; i += 2) {
    p.d[(tile.row + i) * p.n + row] = float_to_bf16(fallback_dot<kFp4, kGranK32>(
        p, p.a + (tile.row + i) * p.k, a_scale + (tile.scale_row + i) * p.a_scale_row, b, b_scale));
  }
}

// A math warpgroup: all tiles, each by the smallest wgmma that holds its rows.
template <bool kFp4, bool kGranK32>
__device__ __forceinline__ void math(const TileScheduler<kLargeMBlocksM>& scheduler,
                                     uint32_t memory, int warpgroup) {
  const MxClusterPlan& p = scheduler.p;
  MathState<kFp4> state(memory, warpgroup);
  WorkTile tile = scheduler.initial_work();
  state.prefetch_scales(scheduler, tile);
  while (scheduler.is_valid(tile)) {
    const WorkTile now = tile;
    bool needs_fallback = false;
    if (tile.rows > 192) {
      needs_fallback = math_tile<kFp4, 256>(scheduler, memory, warpgroup, state, tile);
    } else if (tile.rows > 144) {
      needs_fallback = math_tile<kFp4, 192>(scheduler, memory, warpgroup, state, tile);
    } else if (tile.rows > 128) {
      needs_fallback = math_tile<kFp4, 144>(scheduler, memory, warpgroup, state, tile);
    } else if (tile.rows > 64) {
      needs_fallback = math_tile<kFp4, 128>(scheduler, memory, warpgroup, state, tile);
    } else {
      needs_fallback = math_tile<kFp4, 64>(scheduler, memory, warpgroup, state, tile);
    }
    if (needs_fallback) fallback_tile<kFp4, kGranK32>(p, now, warpgroup);
  }
}

}  // namespace mx_large_m
}  // namespace sm90

template <bool kFp4, bool kGranK32>
__global__ void __launch_bounds__(kPrepareThreads)
    sm90_mx_large_m_prepare_kernel(const __grid_constant__ MxClusterPlan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ __align__(16) union Storage {
    sm90::ListStorage list;
    uint8_t rows[kLargeMBlockBytes];
  } storage;
  extern __shared__ int32_t first_m_blocks[];  // masked only
  sm90::prepare_m_blocks<kLargeMBlocksM>(
      p, storage.list, first_m_blocks, [&](const sm90::WorkTile& m_block, int slice) {
        if (m_block.rows > slice * kSliceM) {
          sm90::mx_large_m::prepare_rows<kFp4, kGranK32>(p, m_block, slice, storage.rows);
        } else if (threadIdx.x == 0) {
          p.flags[m_block.m_block * kSlicesPerBlockM + slice] = 0;
        }
      });
#endif
}

template <bool kFp4, bool kGranK32>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kCtaThreads, 1)
    sm90_mx_large_m_kernel(const __grid_constant__ MxClusterPlan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  namespace kernel = sm90::mx_large_m;
  using Config = MxLargeMConfig<kFp4>;
  extern __shared__ uint8_t raw_memory[];
  const uint32_t memory = (cast_smem_ptr_to_uint(raw_memory) + 1023) & ~1023u;
  const sm90::TileScheduler<kLargeMBlocksM> scheduler{p};
  sm90::run_warp_specialized<Config>(
      memory, [&](int warpgroup) { kernel::math<kFp4, kGranK32>(scheduler, memory, warpgroup); },
      [&](int thread) { sm90::load_weights<Config>(scheduler, memory, thread); },
      [&] { kernel::produce_rows<kFp4>(scheduler, memory); });
#endif
}

}  // namespace dgmoe
