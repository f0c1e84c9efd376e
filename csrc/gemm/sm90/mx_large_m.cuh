// The grouped GEMM of the MX recipes where an expert has many rows: bound by the tensor core, which
// takes both operands as bf16, and next by the instructions that widen the weights.
//
// A pair of blocks takes 256 rows of a weight, one half each, and up to 256 rows of a, in steps of
// 64 columns. e4m3 and e2m1 values times a power of two are exact in bf16, so scales are folded
// into both operands, and nothing is left to do to a product but one scaling, by a constant.
//
// A first kernel widens the rows of a, in the order in which the second one copies them to shared
// memory, and lists the tiles. In the second one two groups of four warps multiply 64 rows of the
// weight each, from registers, where they are widened, once for all rows of a. A third group copies
// some steps ahead, and across the ends of tiles: weights for its own block, and half the rows of a
// for both.
//
// The order of columns within 64 is free. A lane reads 16 columns of a row at once, and they become
// its part of four products of 16 columns.
//
// Scales below 2^-111 of anything but zero, or above 2^16, or NaN, or a NaN value: the group's part
// of the tile is computed once more, value by value.
#pragma once

#include <type_traits>

#include "mx_large_m_prepare.cuh"

namespace dgmoe {
namespace mx_large_m {

// One result, value by value.
template <bool kFp4, bool kGranK32>
__device__ __forceinline__ float single(const MxClusterPlan& p, const uint8_t* a,
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

// Where a warp is, from tile to tile: the stage that it reads, and the scales that it will.
template <bool kFp4>
struct Place : Ring<MxLargeMConfig<kFp4>> {
  using Shape = MxLargeMConfig<kFp4>;
  int last_slot;
  const int32_t* scales[2];  // of its two rows of the weight
  uint32_t next[2];
  uint32_t weights, right;  // of the first stage
  uint32_t selector;
  int row;  // of the weight, in the block's, and 8 more

  __device__ __forceinline__ Place(uint32_t memory, int group) : Ring<Shape>(memory) {
    const int lane = threadIdx.x % 32;
    const int c = lane % 4;
    row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    weights = kept(memory + Shape::kWeights + row * Shape::kRowBytes + c * (kFp4 ? 8 : 16));
    right = kept(low_descriptor(memory));
    selector = kept(selector_of(c / 2));
  }
  // Before the first step of a tile, as early as can be.
  __device__ __forceinline__ void begin(const Tiles<kLargeMBlocksM>& tiles, const Tile& tile) {
    if (!tiles.there(tile)) return;
    const MxClusterPlan& p = tiles.p;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] = p.b_scale + tile.expert * p.b_scale_batch +
                  min(tile.first_weight + row + i * 8, p.n - 1) * p.b_scale_row;
      next[i] = __ldg(scales[i]);
    }
  }
  __device__ __forceinline__ void advance() {
    last_slot = this->slot;
    Ring<Shape>::advance();
  }
};

// One thread copies rows of a.
template <bool kFp4>
__device__ __forceinline__ void copy_rows(const Tiles<kLargeMBlocksM>& tiles, uint32_t memory) {
  using Shape = MxLargeMConfig<kFp4>;
  const MxClusterPlan& p = tiles.p;
  const int32_t steps = p.k / kLargeMBlockK;
  mx_cluster::copy_rows<Shape>(
      tiles, memory, [&](const Tile& tile, int32_t step, int slot, uint32_t full, int32_t rows) {
        const uint32_t to = memory + slot * Shape::kStageBytes;
        const int32_t half = rows * kLargeMBlockK * 2;
        const int32_t begin = half * tiles.block;
        const uint8_t* from = p.rows + (int64_t{tile.m_block} * steps + step) * kLargeMBlockBytes;
        barrier_expect(full, half * 2);
#pragma unroll
        for (int m_block = 0; m_block < kLargeMBlocksM; ++m_block) {
          const int32_t first = max(begin, m_block * kLargeMBlockBytes);
          const int32_t bytes = min(begin + half, (m_block + 1) * kLargeMBlockBytes) - first;
          if (bytes > 0) {
            copy_to_pair(to + first,
                         from + int64_t{m_block} * (steps - 1) * kLargeMBlockBytes + first, bytes,
                         full);
          }
        }
      });
}

// A group's part of a tile of up to kRows rows; goes on to the next tile. Returns whether something
// in it has no place in bf16: then nothing is written.
template <bool kFp4, int kRows>
__device__ __forceinline__ bool multiply_tile(const Tiles<kLargeMBlocksM>& tiles, uint32_t memory,
                                              int group, Place<kFp4>& place, Tile& tile) {
  using Shape = MxLargeMConfig<kFp4>;
  const MxClusterPlan& p = tiles.p;
  const int32_t steps = p.k / kLargeMBlockK;

  float sums[kRows / 2] = {};  // without values, those of all kinds of tiles would live all along
  // Left operands of two products, which are begun together, and of the next two, which are widened
  // meanwhile.
  uint32_t left[2][2][4] = {};
  uint32_t words[2] = {};
  uint32_t largest = 0;
  bool bad = false;
  bool outside = false;
  const auto one = [&](int32_t step, int odd) {
    place.wait();
    Raw<kFp4> raw[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      raw[i].load(place.weights + place.slot * Shape::kStageBytes + i * 8 * Shape::kRowBytes);
    }
    done_reading(place.slot);
    if (outside) {
      const int byte = odd * 2 + threadIdx.x % 4 / 2;
      bad |= needs_scale(words[0], byte, raw[0].magnitudes()) ||
             needs_scale(words[1], byte, raw[1].magnitudes());
    }
    const uint32_t selector = place.selector + odd * 0x2020;
    const uint32_t right = uniform(place.right + place.slot * (Shape::kStageBytes / 16));
    const uint32_t low = factor_of(words[0], selector);
    const uint32_t high = factor_of(words[1], selector);
    const auto products = [&](auto pair) {
      constexpr int kPair = decltype(pair)::value;
      auto& set = left[kPair];
      widen_weights<kFp4, 2 * kPair, 0>(raw[0], low, set[0], largest);
      widen_weights<kFp4, 2 * kPair, 1>(raw[1], high, set[0], largest);
      widen_weights<kFp4, 2 * kPair + 1, 0>(raw[0], low, set[1], largest);
      widen_weights<kFp4, 2 * kPair + 1, 1>(raw[1], high, set[1], largest);
      begin_products();
      multiply<kRows>(sums, set[0], descriptor(right + 4 * kPair));
      multiply<kRows>(sums, set[1], descriptor(right + 4 * kPair + 2));
      commit_products();
      wait_products<1>();
    };
    products(std::integral_constant<int, 0>{});
    if (step > 0) place.release(place.last_slot);
    products(std::integral_constant<int, 1>{});
    place.advance();
  };
  for (int32_t step = 0; step < steps; step += 2) {
    outside = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[i] = place.next[i];
      outside |= out_of_range(words[i]);
      place.scales[i] += p.b_scale_word;
      if (step + 2 < steps) place.next[i] = __ldg(place.scales[i]);
    }
    one(step, 0);
    one(step + 1, 1);
  }
  int32_t flag = 0;
#pragma unroll
  for (int i = 0; i < (kRows + kBlockM - 1) / kBlockM * kSlicesPerBlockM; ++i) {
    flag |= p.flags[tile.m_block * kSlicesPerBlockM + i];
  }
  wait_products<0>();
  place.release(place.last_slot);
  const Tile now = tile;
  tile = tiles.after(now);
  place.begin(tiles, tile);

  if (any_of_group(group, bad || has_nan(largest) || flag != 0)) return true;
  constexpr float kUnscale = kFp4 ? 0x1p24f : 0x1p18f;
  write_tile<kRows>(p, now, group, memory + Shape::kResult, sums, kUnscale);
  return false;
}

// The same, value by value.
template <bool kFp4, bool kGranK32>
__device__ __noinline__ void multiply_singly(const MxClusterPlan& p, const Tile& tile, int group) {
  const int thread = threadIdx.x % 128;
  const int32_t row = tile.first_weight + group * 64 + thread / 2;
  if (row >= p.n) return;
  const uint8_t* b = p.b + (int64_t{tile.expert} * p.n + row) * (kFp4 ? p.k / 2 : p.k);
  const int32_t* b_scale = p.b_scale + tile.expert * p.b_scale_batch + row * p.b_scale_row;
  const int32_t* a_scale = p.a_scale + (p.masked ? tile.expert * p.a_scale_batch : 0);
  for (int32_t i = thread % 2; i < tile.rows; i += 2) {
    p.d[(tile.row + i) * p.n + row] = float_to_bf16(single<kFp4, kGranK32>(
        p, p.a + (tile.row + i) * p.k, a_scale + (tile.scale_row + i) * p.a_scale_row, b, b_scale));
  }
}

template <bool kFp4, bool kGranK32>
__device__ __forceinline__ void multiply_rows(const Tiles<kLargeMBlocksM>& tiles, uint32_t memory,
                                              int group) {
  const MxClusterPlan& p = tiles.p;
  Place<kFp4> place(memory, group);
  Tile tile = tiles.begin();
  place.begin(tiles, tile);
  while (tiles.there(tile)) {
    const Tile now = tile;
    bool again = false;
    if (tile.rows > 192) {
      again = multiply_tile<kFp4, 256>(tiles, memory, group, place, tile);
    } else if (tile.rows > 144) {
      again = multiply_tile<kFp4, 192>(tiles, memory, group, place, tile);
    } else if (tile.rows > 128) {
      again = multiply_tile<kFp4, 144>(tiles, memory, group, place, tile);
    } else if (tile.rows > 64) {
      again = multiply_tile<kFp4, 128>(tiles, memory, group, place, tile);
    } else {
      again = multiply_tile<kFp4, 64>(tiles, memory, group, place, tile);
    }
    if (again) multiply_singly<kFp4, kGranK32>(p, now, group);
  }
}

}  // namespace mx_large_m

template <bool kFp4, bool kGranK32>
__global__ void __launch_bounds__(kPrepareThreads)
    sm90_mx_large_m_prepare_kernel(const __grid_constant__ MxClusterPlan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ __align__(16) union Memory {
    mx_cluster::ListMemory list;
    uint8_t rows[kLargeMBlockBytes];
  } memory;
  extern __shared__ int32_t first_m_blocks[];  // masked only
  mx_cluster::prepare_m_blocks<kLargeMBlocksM>(
      p, memory.list, first_m_blocks, [&](const mx_cluster::Tile& m_block, int slice) {
        if (m_block.rows > slice * kSliceM) {
          mx_large_m::widen_rows<kFp4, kGranK32>(p, m_block, slice, memory.rows);
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
  using Shape = MxLargeMConfig<kFp4>;
  extern __shared__ uint8_t raw_memory[];
  const uint32_t memory = (shared_address(raw_memory) + 1023) & ~1023u;
  const mx_cluster::Tiles<kLargeMBlocksM> tiles{p};
  mx_cluster::run_block<Shape>(
      memory, [&](int group) { mx_large_m::multiply_rows<kFp4, kGranK32>(tiles, memory, group); },
      [&](int thread) { mx_cluster::copy_weights<Shape>(tiles, memory, thread); },
      [&] { mx_large_m::copy_rows<kFp4>(tiles, memory); });
#endif
}

}  // namespace dgmoe
