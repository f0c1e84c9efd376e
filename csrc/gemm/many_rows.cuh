// The grouped GEMM of the MX recipes where an expert has many rows: bound by the tensor core, which
// takes both operands as bf16.
//
// A block takes 256 rows of a weight and kRows rows of a. e4m3 and e2m1 values times a power of two
// are exact in bf16, so scales are folded into both operands, and nothing is left to do to a
// product but one scaling, by a constant. A first kernel widens the rows of a, in the order in
// which the second one copies them to shared memory, 64 columns of a tile of rows at once. In that
// one groups of four warps multiply: their rows of the weight from registers, where they are
// widened. A last group copies some steps ahead, and across the ends of tiles.
//
// The order of columns within 64 is free. A lane reads 16 columns of a row at once, and they become
// its part of four products of 16 columns.
//
// Scales below 2^-111 of anything but zero, or above 2^16, or NaN, or a NaN value: the tile is
// computed once more, value by value.
#pragma once

#include "many_rows_work.cuh"

namespace dgmoe {
namespace many_rows {

template <bool kFp4>
struct Raw {
  uint32_t words[kFp4 ? 2 : 4];

  __device__ __forceinline__ void load(uint32_t shared) {
    if constexpr (kFp4) {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                   : "=r"(words[0]), "=r"(words[1])
                   : "r"(shared)
                   : "memory");
    } else {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(shared)
                   : "memory");
    }
  }
  __device__ __forceinline__ uint32_t magnitudes() const {
    uint32_t all = words[0] | words[1];
    if constexpr (!kFp4) all |= words[2] | words[3];
    return all & 0x7f7f7f7fu;
  }
};

// Of one row of the weight: its words of two left operands, of the first 32 or last 32 columns.
template <bool kFp4, int kHalf>
__device__ __forceinline__ void widen_weights(const Raw<kFp4>& raw, int part, uint32_t factor,
                                              uint32_t (&left)[2][4], uint32_t& nan) {
  if constexpr (kFp4) {
    widen_e2m1<0>(raw.words[part], factor, left[0][kHalf], left[0][2 + kHalf]);
    widen_e2m1<2>(raw.words[part], factor, left[1][kHalf], left[1][2 + kHalf]);
  } else {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      widen_e4m3(raw.words[part * 2 + s], factor, left[s][kHalf], left[s][2 + kHalf], nan);
    }
  }
}

// One result, value by value.
template <bool kFp4, bool kNarrow>
__device__ __noinline__ float single(const ManyRowsPlan& p, const uint8_t* a,
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
    const int32_t a_group = kNarrow ? group : group / 4;
    const float a_factor = ue8m0_to_float(static_cast<uint8_t>(
        static_cast<uint32_t>(a_scale[a_group / 4 * p.a_scale_word]) >> a_group % 4 * 8));
    const float b_factor = ue8m0_to_float(static_cast<uint8_t>(
        static_cast<uint32_t>(b_scale[group / 4 * p.b_scale_word]) >> group % 4 * 8));
    sum = fused_multiply_add(part * a_factor, b_factor, sum);
  }
  return sum;
}

template <bool kFp4, bool kNarrow, int kRows>
__device__ __forceinline__ void multiply_rows(const Tiles<kRows>& tiles, uint32_t memory,
                                              int group) {
  using Shape = ManyRowsShape<kFp4, kRows>;
  constexpr int kBlocks = kManyRowsBlocks;
  const ManyRowsPlan& p = tiles.p;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int c = lane % 4;
  const int32_t row_bytes = kFp4 ? p.k / 2 : p.k;
  const int32_t steps = p.k / kManyRowsColumns;
  const int mine = group * 64 * kBlocks + warp * 16 + lane / 4;  // 8 more, and of each block
  const uint32_t result = memory + Shape::kResult + group * Shape::kResultRows * Shape::kPitch;

  float sums[kBlocks][kRows / 2];
  uint32_t words[kBlocks][2];
  uint32_t next[kBlocks][2];
  uint32_t scale_offset[kBlocks][2];
  const int32_t* scales;
  const auto begin = [&](const Tile& tile) {
    if (!tiles.there(tile)) return;
    scales = p.b_scale + tile.expert * p.b_scale_batch;
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const uint32_t row = min(tile.first_weight + mine + i / 2 * 64 + i % 2 * 8, p.n - 1);
      scale_offset[i / 2][i % 2] = row * static_cast<uint32_t>(p.b_scale_row);
      next[i / 2][i % 2] = __ldg(scales + scale_offset[i / 2][i % 2]);
    }
  };

  int slot = 0;
  uint32_t round = 0;
  Tile tile = tiles.find(blockIdx.x);
  begin(tile);
  while (tiles.there(tile)) {
    uint32_t nan = 0;
    bool bad = false;
    bool outside = false;
    uint32_t left[2][2][4];
    const auto one = [&](int32_t step, int odd) {
      const int byte = odd * 2 + c / 2;
      const uint32_t selector = selector_of(byte);
      const uint32_t stage = memory + slot * Shape::kStageBytes;
      const uint64_t right = descriptor(stage);
      barrier_wait(memory + Shape::kBarriers + slot * 8, round & 1);
      Raw<kFp4> raw[kBlocks][2];
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
        raw[i / 2][i % 2].load(stage + Shape::kWideBytes +
                               (mine + i / 2 * 64 + i % 2 * 8) * Shape::kRowBytes +
                               c * (kFp4 ? 8 : 16));
      }
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (outside) {
          bad |= needs_scale(words[i][0], byte, raw[i][0].magnitudes()) ||
                 needs_scale(words[i][1], byte, raw[i][1].magnitudes());
        }
        const uint32_t low = factor_of(words[i][0], selector);
        const uint32_t high = factor_of(words[i][1], selector);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          widen_weights<kFp4, 0>(raw[i][0], part, low, left[part], nan);
          widen_weights<kFp4, 1>(raw[i][1], part, high, left[part], nan);
          begin_products();
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            multiply(sums[i], left[part][s], right + 4 * part + 2 * s, step + part + s);
          }
          commit_products();
          wait_products<1>();
          if (i == 0 && part == 0 && step > 0 && lane == 0) {
            const int before = slot == 0 ? Shape::kStages - 1 : slot - 1;
            barrier_arrive(memory + Shape::kBarriers + (Shape::kStages + before) * 8);
          }
        }
      }
      if (step + 1 < steps) {
        if (++slot == Shape::kStages) slot = 0, ++round;
      }
    };
    for (int32_t step = 0; step < steps; step += 2) {
      outside = false;
      const int32_t word = step / 2 + 1;
      const bool more = word * 2 < steps;
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
        uint32_t& ahead = next[i / 2][i % 2];
        words[i / 2][i % 2] = ahead;
        outside |= out_of_range(ahead);
        if (more) ahead = __ldg(scales + scale_offset[i / 2][i % 2] + word * p.b_scale_word);
      }
      one(step, 0);
      one(step + 1, 1);
    }
    int32_t flag = 0;
#pragma unroll
    for (int i = 0; i < kManyRowsSlices; ++i) {
      flag |= p.flags[tile.row_tile * kManyRowsSlices + i];
    }
    wait_products<0>();
    if (lane == 0) barrier_arrive(memory + Shape::kBarriers + (Shape::kStages + slot) * 8);
    if (++slot == Shape::kStages) slot = 0, ++round;
    const Tile now = tile;
    tile = tiles.find(now.index + gridDim.x);
    begin(tile);

    const bool again = any_of_group(group, bad || (nan & kNan) != 0 || flag != 0);
    constexpr float kUnscale = kFp4 ? 0x1p24f : 0x1p18f;
    uint16_t* const to = p.d + now.row * p.n;
    const int32_t first = now.first_weight + group * 64 * kBlocks;
    if (again) {
      constexpr int kLanes = 128 / (64 * kBlocks);  // of a row of the weight
      const int32_t row = first + thread / kLanes;
      if (row < p.n) {
        const uint8_t* b = p.b + (int64_t{now.expert} * p.n + row) * row_bytes;
        const int32_t* b_scale = p.b_scale + now.expert * p.b_scale_batch + row * p.b_scale_row;
        const int32_t* a_scale = p.a_scale + (p.masked ? now.expert * p.a_scale_batch : 0);
        for (int32_t i = thread % kLanes; i < now.rows; i += kLanes) {
          to[int64_t{i} * p.n + row] = float_to_bf16(
              single<kFp4, kNarrow>(p, p.a + (now.row + i) * p.k,
                                    a_scale + (now.scale_row + i) * p.a_scale_row, b, b_scale));
        }
      }
      continue;
    }
    // Lanes 0 to 7 address rows of the first matrix, and so on: 8 weights on, 8 rows on, both.
    const uint32_t at =
        result + (lane / 16 * 8 + lane % 8) * Shape::kPitch + (warp * 16 + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int i = 0; i < kBlocks * kRows; i += Shape::kResultRows) {
      const int block = i / kRows;
      const int base = i % kRows;
      const int32_t column = first + block * 64 + thread % 8 * 8;
      if (i > 0) meet(group);
#pragma unroll
      for (int j = 0; j < Shape::kResultRows / 8; j += 2) {
        uint32_t packed[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float x = sums[block][(base / 8 + j) * 4 + q * 2] * kUnscale;
          const float y = sums[block][(base / 8 + j) * 4 + q * 2 + 1] * kUnscale;
          asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed[q]) : "f"(y), "f"(x));
        }
        store_transposed(at + j * 8 * Shape::kPitch, packed);
      }
      meet(group);
#pragma unroll
      for (int j = 0; j < Shape::kResultRows / 16; ++j) {
        const int32_t row = thread / 8 + j * 16;
        uint4 v;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(result + row * Shape::kPitch + thread % 8 * 16)
                     : "memory");
        if (base + row < now.rows && column < p.n) {
          *reinterpret_cast<uint4*>(to + int64_t{base + row} * p.n + column) = v;
        }
      }
    }
  }
}

}  // namespace many_rows

// A block a tile of rows and slice of its columns.
template <bool kFp4, bool kNarrow, int kRows>
__global__ void __launch_bounds__(kWidenThreads)
    widen_rows_kernel(const __grid_constant__ ManyRowsPlan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = ManyRowsShape<kFp4, kRows>;
  extern __shared__ __align__(16) uint8_t widen_memory[];
  int32_t* const first = reinterpret_cast<int32_t*>(widen_memory + Shape::kWideBytes);
  if (p.masked) {
    if (threadIdx.x < 32) many_rows::count_tiles<kRows>(p, first);
    __syncthreads();
  }
  many_rows::Tiles<kRows> tiles{p, first, 0, 0};
  tiles.row_tiles = p.masked ? first[p.experts] : static_cast<int32_t>((p.m + kRows - 1) / kRows);
  for (int32_t i = blockIdx.x; i < tiles.row_tiles * kManyRowsSlices; i += gridDim.x) {
    many_rows::Tile tile{};
    tile.row_tile = i / kManyRowsSlices;
    tiles.find_rows(tile);
    if (tile.rows == 0) continue;
    many_rows::widen_rows<kFp4, kNarrow, kRows>(p, tile, i % kManyRowsSlices, widen_memory);
  }
#endif
}

template <bool kFp4, bool kNarrow, int kRows>
__global__ void __launch_bounds__(kManyRowsThreads, 1)
    many_rows_kernel(const __grid_constant__ ManyRowsPlan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = ManyRowsShape<kFp4, kRows>;
  extern __shared__ uint8_t raw_memory[];
  const uint32_t base = shared_address(raw_memory);
  const uint32_t memory = (base + 1023) & ~1023u;
  int32_t* const first = reinterpret_cast<int32_t*>(raw_memory + (memory - base) + Shape::kFirst);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      many_rows::barrier_init(memory + Shape::kBarriers + i * 8, 129);
      many_rows::barrier_init(memory + Shape::kBarriers + (Shape::kStages + i) * 8,
                              4 * kManyRowsGroups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (p.masked && warp == 1) many_rows::count_tiles<kRows>(p, first);
  __syncthreads();
  many_rows::Tiles<kRows> tiles{p, first, 0, 0};
  tiles.row_tiles = p.masked ? first[p.experts] : static_cast<int32_t>((p.m + kRows - 1) / kRows);
  tiles.weight_tiles = (p.n + kManyRowsWeights - 1) / kManyRowsWeights;
  if (warp < 4 * kManyRowsGroups) {
    many_rows::take_registers<kManyRowsGroups == 2 ? 232 : 112>();
    many_rows::multiply_rows<kFp4, kNarrow, kRows>(tiles, memory, warp / 4);
  } else {
    many_rows::give_registers<kManyRowsGroups == 2 ? 40 : 32>();
    many_rows::copy_rows<kFp4, kRows>(tiles, memory);
  }
#endif
}

}  // namespace dgmoe
