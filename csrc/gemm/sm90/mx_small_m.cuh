// The grouped GEMM of the MX recipes where an expert has few rows: bound by the weights' way from
// memory, so that weights stay packed until they are in registers.
//
// A block takes 64 rows of a weight and 8 * kTiles rows of a, over all of k, 128 bytes of each
// weight row at once, by asynchronous copies some steps ahead and across the ends of its tiles. Its
// warps multiply the weight's rows by the tensor core's m64nNk32, 32 columns at a time: one group
// of b, whose scale is applied to the partial product in fp32. The weights are the left operand,
// from registers.
//
// FP4: a lane's eight codes of a group stand in one word of a row; the even ones become one
// register of the left operand, the odd ones another, and the bytes of a are parted likewise in
// shared memory, since the order of columns within a group is free. An e2m1 code shifted into the
// place of an e4m3 value is 2^-6 of it, zero and one half included.
#pragma once

#include "mx_small_m_scheduler.cuh"

namespace dgmoe {
namespace mx_small_m {

// Makes of a stage what its products need: scales as factors; FP4's a parted into the even and the
// odd columns of each group.
template <bool kFp4, bool kGranK32, typename Shape>
__device__ __forceinline__ void make(uint32_t stage, uint32_t made, int32_t step) {
  const int thread = threadIdx.x;
  if (Shape::kWords * kSmallMBlockN == kSmallMThreads || thread < kSmallMBlockN) {
    const uint32_t word = load_word(stage + Shape::kBScale + thread * 4);
    store_factors(made + Shape::kBFactors + thread * 16, power(word, 0), power(word, 1),
                  power(word, 2), power(word, 3));
  }
  if (thread < Shape::kRows) {
    uint32_t word = load_word(stage + Shape::kAScale + thread * 4);
    if constexpr (!kGranK32) word >>= step * Shape::kWords % 4 * 8;
#pragma unroll
    for (int i = 0; i < Shape::kAFactors; ++i) {
      store_factor(made + Shape::kRowFactors + (i * Shape::kRows + thread) * 4, power(word, i));
    }
  }
  if constexpr (kFp4) {
    constexpr int kChunks = Shape::kColumns / 16;
    static_assert(Shape::kRows * kChunks % kSmallMThreads == 0);
#pragma unroll
    for (int n = 0; n < Shape::kRows * kChunks / kSmallMThreads; ++n) {
      // Eight rows of a column beside each other: they meet all banks, here and there.
      const int i = thread + n * kSmallMThreads;
      const int row = i / (8 * kChunks) * 8 + i % 8;
      const int chunk = i / 8 % kChunks;
      uint32_t x[4];
      load_words(x, stage + Shape::kA + Shape::raw(row, chunk));
      const uint32_t to = made + Shape::kParted + Shape::core(row, chunk / 2, 0) + chunk % 2 * 8;
      store_words(to, __byte_perm(x[0], x[1], 0x6420), __byte_perm(x[2], x[3], 0x6420));
      store_words(to + Shape::kCore, __byte_perm(x[0], x[1], 0x7531),
                  __byte_perm(x[2], x[3], 0x7531));
    }
  }
}

// Products of four groups of a stage, those of a word of scales, on their way while other work is
// done. FP4's other word follows: both at once would take the registers of a fourth block.
// sums[4t ..] are of rows g and g + 8 of the warp's weights and of rows 2q and 2q + 1 of the t-th
// eight of a.
template <bool kFp4, bool kGranK32, int kTiles, typename Shape>
struct Products {
  uint32_t left[4][4];
  float parts[4][4 * kTiles];

  template <int kWord>
  __device__ __forceinline__ void begin(uint32_t stage, uint32_t made) {
    const int lane = threadIdx.x % 32;
    const int first = threadIdx.x / 32 * 16;
    // Lanes 0 to 7 address rows 0 to 7 of the first matrix, and so on: rows 8 to 15, then the next
    // 16 bytes of both.
    const uint32_t weights =
        stage + (first + lane % 16) * kSmallMRowBytes + (lane / 16 ^ lane % 8) * 16;
    const uint64_t a = describe<Shape>(kFp4 ? made + Shape::kParted : stage + Shape::kA);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kFp4) {
        uint32_t raw[4];
        if (i % 2 != 0) continue;
        load_matrices(raw, weights ^ (4 * kWord + i) * 16);
#pragma unroll
        for (int j = 0; j < 2; ++j) unpack(left[i + j], raw[2 * j], raw[2 * j + 1]);
      } else {
        load_matrices(left[i], weights ^ (4 * kWord + i) * 32);
      }
    }
    begin_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      product(parts[i], left[i], a + (Shape::core(0, 4 * kWord + i, 0) >> 4));
    }
    commit_products();
  }

  template <int kWord>
  __device__ __forceinline__ void finish(uint32_t made, float (&sums)[4 * kTiles]) {
    const int lane = threadIdx.x % 32;
    const int first = threadIdx.x / 32 * 16;
    const uint32_t b_factors =
        made + Shape::kBFactors + (kWord * kSmallMBlockN + first + lane / 4) * 16;
    const uint32_t row_factors = made + Shape::kRowFactors + lane % 4 * 8;
    float factors[2][4];
    load_factors(factors[0], b_factors);
    load_factors(factors[1], b_factors + 8 * 16);
    wait_products<0>();
#pragma unroll
    for (int i = 0; i < 4; ++i) keep(parts[i]), keep(left[i]);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float inner[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&part)[4 * kTiles] = parts[i];
        if constexpr (kGranK32) {
          const float2 of_rows =
              load_pair(row_factors + ((kWord * 4 + i) * Shape::kRows + t * 8) * 4);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float scaled = part[4 * t + j] * factors[j / 2][i];
            float& sum = sums[4 * t + j];
            sum = fused_multiply_add(scaled, j % 2 == 0 ? of_rows.x : of_rows.y, sum);
          }
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float factor = factors[j / 2][i];
            inner[j] = i == 0 ? part[4 * t + j] * factor
                              : fused_multiply_add(part[4 * t + j], factor, inner[j]);
          }
        }
      }
      if constexpr (!kGranK32) {
        const float2 of_rows = load_pair(row_factors + (kWord * Shape::kRows + t * 8) * 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& sum = sums[4 * t + j];
          sum = fused_multiply_add(inner[j], j % 2 == 0 ? of_rows.x : of_rows.y, sum);
        }
      }
    }
  }
};

// Rounds a tile's sums and writes them.
template <bool kFp4, int kTiles>
__device__ __forceinline__ void write_tile(const MxSmallMPlan& p, const Target& target,
                                           const float (&sums)[4 * kTiles]) {
  const int lane = threadIdx.x % 32;
  const int32_t column = target.first_weight + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) {
    const int32_t row = i / 4 * 8 + lane % 4 * 2 + i % 2;
    const int32_t to = column + i / 2 % 2 * 8;
    const float y = kFp4 ? sums[i] * 64.0f : sums[i];
    if (row < target.left && to < p.n) p.d[(target.row + row) * p.n + to] = float_to_bf16(y);
  }
}

}  // namespace mx_small_m

template <bool kFp4, bool kGranK32, int kTiles>
__global__ void __launch_bounds__(kSmallMThreads, 4)
    sm90_mx_small_m_kernel(const __grid_constant__ MxSmallMPlan p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = MxSmallMConfig<kFp4, kGranK32, kTiles>;
  constexpr int kStages = Shape::kStages;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ mx_small_m::Target targets[kStages];  // of the tiles under way
  const mx_small_m::List list = mx_small_m::make_list<Shape::kRows>(
      p, reinterpret_cast<int32_t*>(memory + kStages * Shape::kBytes + 2 * Shape::kMadeBytes));
  const uint32_t stages = shared_address(memory);
  const uint32_t made = stages + kStages * Shape::kBytes;
  const int32_t steps = (p.k + Shape::kColumns - 1) / Shape::kColumns;
  const auto after = [](int slot) { return slot == kStages - 1 ? 0 : slot + 1; };
  mx_small_m::Cursor<Shape> ahead;
  mx_small_m::Source<kFp4, kGranK32, Shape> source;
  int put = 0;    // slot to fetch into
  int aimed = 0;  // of the targets
  const auto fetch = [&] {
    if (ahead.tile < list.tiles) {
      if (ahead.step == 0) {
        ahead.find(p, list);
        source.aim(p, ahead);
        if (threadIdx.x == 0) targets[aimed] = ahead.target;
      }
      source.copy(p, ahead.step, stages + put * Shape::kBytes);
      if (++ahead.step == steps) {
        ahead.step = 0;
        ahead.tile += gridDim.x;
        aimed = after(aimed);
      }
    }
    put = after(put);
    commit_async();
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) fetch();
  wait_async<kStages - 2>();
  __syncthreads();
  mx_small_m::make<kFp4, kGranK32, Shape>(stages, made, 0);
  mx_small_m::publish();
  int step = 0;  // of the tile being computed
  int slot = 0;
  int target = 0;
  int odd = 0;  // of the two made
  float sums[4 * kTiles] = {};
  for (int32_t tile = blockIdx.x; tile < list.tiles;) {
    // Everybody's copies of the next stage are there, and everybody is done with the one before.
    wait_async<kStages - 3>();
    if constexpr (!kFp4) mx_small_m::publish();
    __syncthreads();
    mx_small_m::Products<kFp4, kGranK32, kTiles, Shape> products;
    const uint32_t now = made + odd * Shape::kMadeBytes;
    const uint32_t stage = stages + slot * Shape::kBytes;
    products.template begin<0>(stage, now);
    fetch();
    slot = after(slot);
    odd ^= 1;
    mx_small_m::make<kFp4, kGranK32, Shape>(stages + slot * Shape::kBytes,
                                            made + odd * Shape::kMadeBytes,
                                            step + 1 == steps ? 0 : step + 1);
    mx_small_m::publish();
    products.template finish<0>(now, sums);
    if constexpr (Shape::kWords == 2) {
      products.template begin<1>(stage, now);
      products.template finish<1>(now, sums);
    }
    if (++step < steps) continue;
    mx_small_m::write_tile<kFp4, kTiles>(p, targets[target], sums);
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    step = 0;
    tile += gridDim.x;
    target = after(target);
  }
#endif
}

}  // namespace dgmoe
