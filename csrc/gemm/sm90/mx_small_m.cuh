// sm90_mx_small_m: the grouped GEMM of the MX recipes where an expert has few rows. It is bound by
// the bandwidth at which weights are read, so they stay packed until they are in registers.
//
// CTA tile         M 8 or 16 (kTiles 1 or 2) x N 64, K 128 (FP8) or 256 (FP4) a stage
// cluster          none; 4 CTAs an SM, persistent
// stages           4; 3 for FP4 with M 16. Scales, and FP4's a, are converted one stage ahead, into
//                  two further buffers
// warp roles       none: all 4 warps issue cp.async, convert, and are one math warpgroup
// operand source   wgmma m64nMk32 e4m3, operands swapped: the weight from registers (ldmatrix; e2m1
//                  unpacked to e4m3 there), a from shared memory without swizzle
// scales           in fp32 on the accumulators of each group of 32 columns: one UE8M0 of a weight's
//                  row, then one of a's row for 32 (kGranK32) or 128 columns
// shared memory    FP8 40,704 bytes with M 8, and 45,056 (kGranK32) or 44,800 with M 16; FP4 51,968
//                  and 51,328; 12 more a segment
// registers        96 to 116 a thread (FP8), 126 to 128 (FP4); 128 is the bound for 4 CTAs
#pragma once

#include "mx_small_m_load.cuh"

namespace dgmoe {
namespace sm90 {
namespace mx_small_m {

// Converts a stage: scales to fp32, and FP4's a into even and odd columns of each group.
template <bool kFp4, bool kGranK32, typename Config>
__device__ __forceinline__ void convert_stage(uint32_t stage, uint32_t converted, int32_t k_block) {
  const int thread = threadIdx.x;
  if (Config::kWords * kSmallMBlockN == kSmallMThreads || thread < kSmallMBlockN) {
    const uint32_t word = ld_shared_b32(stage + Config::kBScale + thread * 4);
    st_shared_v4_f32(converted + Config::kBScaleF32 + thread * 16, ue8m0_of_word(word, 0),
                     ue8m0_of_word(word, 1), ue8m0_of_word(word, 2), ue8m0_of_word(word, 3));
  }
  if (thread < Config::kBlockM) {
    uint32_t word = ld_shared_b32(stage + Config::kAScale + thread * 4);
    if constexpr (!kGranK32) word >>= k_block * Config::kWords % 4 * 8;
#pragma unroll
    for (int i = 0; i < Config::kAScales; ++i) {
      st_shared_f32(converted + Config::kAScaleF32 + (i * Config::kBlockM + thread) * 4,
                    ue8m0_of_word(word, i));
    }
  }
  if constexpr (kFp4) {
    constexpr int kChunks = Config::kBlockK / 16;
    static_assert(Config::kBlockM * kChunks % kSmallMThreads == 0);
#pragma unroll
    for (int n = 0; n < Config::kBlockM * kChunks / kSmallMThreads; ++n) {
      // Eight rows of a column of chunks together: no bank conflicts on either side.
      const int i = thread + n * kSmallMThreads;
      const int row = i / (8 * kChunks) * 8 + i % 8;
      const int chunk = i / 8 % kChunks;
      uint32_t x[4];
      ld_shared_v4_b32(x, stage + Config::kA + Config::row_major(row, chunk));
      const uint32_t to =
          converted + Config::kASplit + Config::core_matrix(row, chunk / 2, 0) + chunk % 2 * 8;
      st_shared_v2_b32(to, __byte_perm(x[0], x[1], 0x6420), __byte_perm(x[2], x[3], 0x6420));
      st_shared_v2_b32(to + Config::kCoreBytes, __byte_perm(x[0], x[1], 0x7531),
                       __byte_perm(x[2], x[3], 0x7531));
    }
  }
}

// The wgmmas of the four groups of a word of scales, pending while other work is done. FP4's second
// word follows after: both at once would take the registers of a fourth CTA. accum[4t ..] are of
// rows g and g + 8 of the warp's 16 of the weight and of rows 2q and 2q + 1 of the t-th eight of a,
// for lane 4g + q.
template <bool kFp4, bool kGranK32, int kTiles, typename Config>
struct Mma {
  uint32_t fragments[4][4];
  float partial[4][4 * kTiles];

  template <int kWord>
  __device__ __forceinline__ void issue(uint32_t stage, uint32_t converted) {
    const int lane = threadIdx.x % 32;
    const int first = threadIdx.x / 32 * 16;
    // Matrices of ldmatrix: rows 0 to 7, rows 8 to 15, then the next 16 bytes of both.
    const uint32_t b = stage + (first + lane % 16) * kSmallMRowBytes + (lane / 16 ^ lane % 8) * 16;
    const uint64_t a =
        make_smem_desc_no_swizzle<Config::kCoreBytes, Config::kGroups * 2 * Config::kCoreBytes>(
            kFp4 ? converted + Config::kASplit : stage + Config::kA);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kFp4) {
        uint32_t raw[4];
        if (i % 2 != 0) continue;
        ldmatrix_x4(raw, b ^ (4 * kWord + i) * 16);
#pragma unroll
        for (int j = 0; j < 2; ++j) e2m1_fragment(fragments[i + j], raw[2 * j], raw[2 * j + 1]);
      } else {
        ldmatrix_x4(fragments[i], b ^ (4 * kWord + i) * 32);
      }
    }
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      wgmma_e4m3<8 * kTiles>(partial[i], fragments[i],
                             a + (Config::core_matrix(0, 4 * kWord + i, 0) >> 4));
    }
    warpgroup_commit_batch();
  }

  // Promotes them: scales the partial products and adds them to the accumulators.
  template <int kWord>
  __device__ __forceinline__ void promote(uint32_t converted, float (&accum)[4 * kTiles]) {
    const int lane = threadIdx.x % 32;
    const int first = threadIdx.x / 32 * 16;
    const uint32_t b_scales =
        converted + Config::kBScaleF32 + (kWord * kSmallMBlockN + first + lane / 4) * 16;
    const uint32_t a_scales = converted + Config::kAScaleF32 + lane % 4 * 8;
    float b_scale[2][4];
    ld_shared_v4_f32(b_scale[0], b_scales);
    ld_shared_v4_f32(b_scale[1], b_scales + 8 * 16);
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      warpgroup_fence_operand(partial[i]), warpgroup_fence_operand(fragments[i]);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float inner[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&part)[4 * kTiles] = partial[i];
        if constexpr (kGranK32) {
          const float2 a_scale =
              ld_shared_v2_f32(a_scales + ((kWord * 4 + i) * Config::kBlockM + t * 8) * 4);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float scaled = part[4 * t + j] * b_scale[j / 2][i];
            float& sum = accum[4 * t + j];
            sum = fused_multiply_add(scaled, j % 2 == 0 ? a_scale.x : a_scale.y, sum);
          }
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float scale = b_scale[j / 2][i];
            inner[j] = i == 0 ? part[4 * t + j] * scale
                              : fused_multiply_add(part[4 * t + j], scale, inner[j]);
          }
        }
      }
      if constexpr (!kGranK32) {
        const float2 a_scale = ld_shared_v2_f32(a_scales + (kWord * Config::kBlockM + t * 8) * 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& sum = accum[4 * t + j];
          sum = fused_multiply_add(inner[j], j % 2 == 0 ? a_scale.x : a_scale.y, sum);
        }
      }
    }
  }
};

// The epilogue: rounds to bf16 and stores. FP4's codes were 2^-6 of their values.
template <bool kFp4, int kTiles>
__device__ __forceinline__ void store_tile(const MxSmallMPlan& p, const OutputTile& output,
                                           const float (&accum)[4 * kTiles]) {
  const int lane = threadIdx.x % 32;
  const int32_t column = output.first_n + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) {
    const int32_t row = i / 4 * 8 + lane % 4 * 2 + i % 2;
    const int32_t to = column + i / 2 % 2 * 8;
    const float y = kFp4 ? accum[i] * 64.0f : accum[i];
    if (row < output.rows && to < p.n) p.d[(output.row + row) * p.n + to] = float_to_bf16(y);
  }
}

}  // namespace mx_small_m
}  // namespace sm90

template <bool kFp4, bool kGranK32, int kTiles>
__global__ void __launch_bounds__(kSmallMThreads, 4)
    sm90_mx_small_m_kernel(const __grid_constant__ MxSmallMPlan p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  namespace kernel = sm90::mx_small_m;
  using Config = MxSmallMConfig<kFp4, kGranK32, kTiles>;
  constexpr int kStages = Config::kStages;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ kernel::OutputTile outputs[kStages];  // of the tiles in flight
  const kernel::SegmentList list = kernel::list_segments<Config::kBlockM>(
      p, reinterpret_cast<int32_t*>(memory + kStages * Config::kStageBytes +
                                    2 * Config::kConvertedBytes));
  const uint32_t stages = cast_smem_ptr_to_uint(memory);
  const uint32_t converted = stages + kStages * Config::kStageBytes;
  const int32_t k_blocks = (p.k + Config::kBlockK - 1) / Config::kBlockK;
  const auto after = [](int index) { return index == kStages - 1 ? 0 : index + 1; };
  kernel::LoadScheduler<Config> loads;
  kernel::Loader<kFp4, kGranK32, Config> loader;
  int write_stage = 0;
  int write_output = 0;
  const auto load_next = [&] {
    if (loads.tile < list.tiles) {
      if (loads.k_block == 0) {
        loads.fetch_tile(p, list);
        loader.set_tile(p, loads);
        if (threadIdx.x == 0) outputs[write_output] = loads.output;
      }
      loader.load(p, loads.k_block, stages + write_stage * Config::kStageBytes);
      if (++loads.k_block == k_blocks) {
        loads.k_block = 0;
        loads.tile += gridDim.x;
        write_output = after(write_output);
      }
    }
    write_stage = after(write_stage);
    cp_async_fence();
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) load_next();
  cp_async_wait<kStages - 2>();
  __syncthreads();
  kernel::convert_stage<kFp4, kGranK32, Config>(stages, converted, 0);
  fence_view_async_shared();
  int k_block = 0;  // of the tile in the mainloop
  int read_stage = 0;
  int read_output = 0;
  int buffer = 0;  // of the two converted stages
  float accum[4 * kTiles] = {};
  for (int32_t tile = blockIdx.x; tile < list.tiles;) {
    // The next stage has landed for all threads, and all have finished with the one before.
    cp_async_wait<kStages - 3>();
    if constexpr (!kFp4) fence_view_async_shared();
    __syncthreads();
    kernel::Mma<kFp4, kGranK32, kTiles, Config> mma;
    const uint32_t now = converted + buffer * Config::kConvertedBytes;
    const uint32_t stage = stages + read_stage * Config::kStageBytes;
    mma.template issue<0>(stage, now);
    load_next();
    read_stage = after(read_stage);
    buffer ^= 1;
    kernel::convert_stage<kFp4, kGranK32, Config>(stages + read_stage * Config::kStageBytes,
                                                  converted + buffer * Config::kConvertedBytes,
                                                  k_block + 1 == k_blocks ? 0 : k_block + 1);
    fence_view_async_shared();
    mma.template promote<0>(now, accum);
    if constexpr (Config::kWords == 2) {
      mma.template issue<1>(stage, now);
      mma.template promote<1>(now, accum);
    }
    if (++k_block < k_blocks) continue;
    kernel::store_tile<kFp4, kTiles>(p, outputs[read_output], accum);
#pragma unroll
    for (float& sum : accum) sum = 0.0f;
    k_block = 0;
    tile += gridDim.x;
    read_output = after(read_output);
  }
#endif
}

}  // namespace dgmoe
