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

#include "many_rows_copies.cuh"
#include "many_rows_tiles.cuh"

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
      load_words(words, shared);
    }
  }
  __device__ __forceinline__ uint32_t magnitudes() const {
    uint32_t all = words[0] | words[1];
    if constexpr (!kFp4) all |= words[2] | words[3];
    return all & 0x7f7f7f7fu;
  }
};

// Of one row of the weight: its words of the left operand of product kProduct of a step's four, of
// its first 8 rows or its last.
template <bool kFp4, int kProduct, int kHalf>
__device__ __forceinline__ void widen_weights(const Raw<kFp4>& raw, uint32_t factor,
                                              uint32_t (&left)[4], uint32_t& largest) {
  if constexpr (kFp4) {
    widen_e2m1<kProduct % 2 * 2>(raw.words[kProduct / 2], factor, left[kHalf], left[2 + kHalf]);
  } else {
    widen_e4m3(raw.words[kProduct], factor, left[kHalf], left[2 + kHalf], largest);
  }
}

// One result, value by value.
template <bool kFp4, bool kNarrow>
__device__ __forceinline__ float single(const ManyRowsPlan& p, const uint8_t* a,
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

// Where a warp is, from tile to tile: the stage that it reads, and the scales that it will.
template <bool kFp4>
struct Place {
  using Shape = ManyRowsShape<kFp4>;
  int slot = 0;
  int last_slot;
  uint32_t parity = 0;
  const int32_t* scales[2];  // of its two rows of the weight
  uint32_t next[2];
  // Of the first stage.
  uint32_t full, empty, weights, right;
  uint32_t selector;
  int row;  // of the weight, in the block's, and 8 more

  __device__ __forceinline__ Place(uint32_t memory, int group) {
    const int lane = threadIdx.x % 32;
    const int c = lane % 4;
    row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    full = kept(memory + Shape::kFull);
    empty = kept(address_in(memory + Shape::kEmpty, lane % 2));
    weights = kept(memory + Shape::kWeights + row * Shape::kRowBytes + c * (kFp4 ? 8 : 16));
    right = kept(low_descriptor(memory));
    selector = kept(selector_of(c / 2));
  }
  // Before the first step of a tile, as early as can be.
  __device__ __forceinline__ void begin(const Tiles& tiles, const Tile& tile) {
    if (!tiles.there(tile)) return;
    const ManyRowsPlan& p = tiles.p;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] = p.b_scale + tile.expert * p.b_scale_batch +
                  min(tile.first_weight + row + i * 8, p.n - 1) * p.b_scale_row;
      next[i] = __ldg(scales[i]);
    }
  }
  __device__ __forceinline__ void advance() {
    last_slot = slot;
    if (++slot == Shape::kStages) slot = 0, parity ^= 1;
  }
  // The tensor core has read the rows of a stage: in both blocks, which copy to both.
  __device__ __forceinline__ void release(int of) const {
    if (threadIdx.x % 32 < 2) barrier_arrive_at(empty + of * 8);
  }
};

// A group's part of a tile of up to kRows rows; goes on to the next tile. Returns whether something
// in it has no place in bf16: then nothing is written.
template <bool kFp4, int kRows>
__device__ __forceinline__ bool multiply_tile(const Tiles& tiles, uint32_t memory, int group,
                                              Place<kFp4>& place, Tile& tile) {
  using Shape = ManyRowsShape<kFp4>;
  const ManyRowsPlan& p = tiles.p;
  const int32_t steps = p.k / kManyRowsColumns;

  float sums[kRows / 2] = {};  // without values, those of all kinds of tiles would live all along
  // Left operands of two products, which are begun together, and of the next two, which are widened
  // meanwhile.
  uint32_t left[2][2][4] = {};
  uint32_t words[2] = {};
  uint32_t largest = 0;
  bool bad = false;
  bool outside = false;
  const auto one = [&](int32_t step, int odd) {
    barrier_wait(place.full + place.slot * 8, place.parity);
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
    // The same in all lanes: this says so to the compiler, which has it in uniform registers then.
    const uint32_t right =
        __reduce_max_sync(0xffffffffu, place.right + place.slot * (Shape::kStageBytes / 16));
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
  for (int i = 0; i < (kRows + kManyRowsUnit - 1) / kManyRowsUnit * kManyRowsSlices; ++i) {
    flag |= p.flags[tile.unit * kManyRowsSlices + i];
  }
  wait_products<0>();
  place.release(place.last_slot);
  const Tile now = tile;
  tile = tiles.after(now);
  place.begin(tiles, tile);

  const bool again = any_of_group(group, bad || has_nan(largest) || flag != 0);
  constexpr float kUnscale = kFp4 ? 0x1p24f : 0x1p18f;
  uint16_t* const to = p.d + now.row * p.n;
  const int32_t first = now.first_weight + group * 64;
  if (again) return true;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const uint32_t result = memory + Shape::kResult + group * 64 * Shape::kPitch;
  // Lanes 0 to 7 address rows of the first matrix, and so on: 8 weights on, 8 rows on, both.
  const uint32_t at =
      result + (lane / 16 * 8 + lane % 8) * Shape::kPitch + (warp * 16 + lane / 8 % 2 * 8) * 2;
  const int32_t column = first + thread % 8 * 8;
#pragma unroll
  for (int base = 0; base < kRows; base += 64) {
    const int here = kRows - base < 64 ? kRows - base : 64;
    if (base > 0) meet(group);
#pragma unroll
    for (int j = 0; j < here / 8; j += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float x = sums[(base / 8 + j) * 4 + q * 2] * kUnscale;
        const float y = sums[(base / 8 + j) * 4 + q * 2 + 1] * kUnscale;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed[q]) : "f"(y), "f"(x));
      }
      store_transposed(at + j * 8 * Shape::kPitch, packed);
    }
    meet(group);
#pragma unroll
    for (int j = 0; j < here / 16; ++j) {
      const int32_t row = thread / 8 + j * 16;
      uint32_t chunk[4];
      load_words(chunk, result + row * Shape::kPitch + thread % 8 * 16);
      if (base + row < now.rows && column < p.n) {
        *reinterpret_cast<uint4*>(to + int64_t{base + row} * p.n + column) =
            make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
      }
    }
  }
  return false;
}

// The same, value by value.
template <bool kFp4, bool kNarrow>
__device__ __noinline__ void multiply_singly(const ManyRowsPlan& p, const Tile& tile, int group) {
  const int thread = threadIdx.x % 128;
  const int32_t row = tile.first_weight + group * 64 + thread / 2;
  if (row >= p.n) return;
  const uint8_t* b = p.b + (int64_t{tile.expert} * p.n + row) * (kFp4 ? p.k / 2 : p.k);
  const int32_t* b_scale = p.b_scale + tile.expert * p.b_scale_batch + row * p.b_scale_row;
  const int32_t* a_scale = p.a_scale + (p.masked ? tile.expert * p.a_scale_batch : 0);
  for (int32_t i = thread % 2; i < tile.rows; i += 2) {
    p.d[(tile.row + i) * p.n + row] = float_to_bf16(single<kFp4, kNarrow>(
        p, p.a + (tile.row + i) * p.k, a_scale + (tile.scale_row + i) * p.a_scale_row, b, b_scale));
  }
}

template <bool kFp4, bool kNarrow>
__device__ __forceinline__ void multiply_rows(const Tiles& tiles, uint32_t memory, int group) {
  const ManyRowsPlan& p = tiles.p;
  Place<kFp4> place(memory, group);
  Tile tile = tiles.begin();
  place.begin(tiles, tile);
  while (tiles.there(tile)) {
    const Tile now = tile;
    bool again = false;
    if (tile.rows > 192) {
      again = multiply_tile<kFp4, 256>(tiles, memory, group, place, tile);
    } else if (tile.rows > 160) {
      again = multiply_tile<kFp4, 192>(tiles, memory, group, place, tile);
    } else if (tile.rows > 128) {
      again = multiply_tile<kFp4, 160>(tiles, memory, group, place, tile);
    } else if (tile.rows > 64) {
      again = multiply_tile<kFp4, 128>(tiles, memory, group, place, tile);
    } else {
      again = multiply_tile<kFp4, 64>(tiles, memory, group, place, tile);
    }
    if (again) multiply_singly<kFp4, kNarrow>(p, now, group);
  }
}

}  // namespace many_rows

// One block lists the tiles; the others take a slice of a unit each.
template <bool kFp4, bool kNarrow>
__global__ void __launch_bounds__(kWidenThreads)
    widen_rows_kernel(const __grid_constant__ ManyRowsPlan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ __align__(16) union Memory {
    many_rows::ListMemory list;
    uint8_t rows[kManyRowsWideBytes];
  } memory;
  extern __shared__ int32_t first_units[];  // masked only
  if (blockIdx.x == 0) return many_rows::list_tiles(p, memory.list);
  if (p.masked) {
    if (threadIdx.x < 32) many_rows::count_units(p, first_units);
    __syncthreads();
  }
  const int32_t units = p.masked ? first_units[p.experts]
                                 : static_cast<int32_t>((p.m + kManyRowsUnit - 1) / kManyRowsUnit);
  for (int32_t i = blockIdx.x - 1; i < units * kManyRowsSlices; i += gridDim.x - 1) {
    const many_rows::Tile tile = many_rows::find_unit(p, first_units, i / kManyRowsSlices);
    const int slice = i % kManyRowsSlices;
    if (tile.rows > slice * (kManyRowsUnit / kManyRowsSlices)) {
      many_rows::widen_rows<kFp4, kNarrow>(p, tile, slice, memory.rows);
    } else if (threadIdx.x == 0) {
      p.flags[i] = 0;
    }
  }
#endif
}

template <bool kFp4, bool kNarrow>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kManyRowsThreads, 1)
    many_rows_kernel(const __grid_constant__ ManyRowsPlan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = ManyRowsShape<kFp4>;
  extern __shared__ uint8_t raw_memory[];
  const uint32_t memory = (shared_address(raw_memory) + 1023) & ~1023u;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      many_rows::barrier_init(memory + Shape::kFull + i * 8, kManyRowsCopying + 1);
      many_rows::barrier_init(memory + Shape::kEmpty + i * 8, 2 * 4 * kManyRowsGroups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  many_rows::meet_pair();
  const many_rows::Tiles tiles{p};
  if (warp < 4 * kManyRowsGroups) {
    many_rows::take_registers<224>();
    many_rows::multiply_rows<kFp4, kNarrow>(tiles, memory, warp / 4);
  } else {
    many_rows::give_registers<56>();
    const int thread = threadIdx.x - 128 * kManyRowsGroups;
    if (thread < kManyRowsCopying) {
      many_rows::copy_weights<kFp4>(tiles, memory, thread);
    } else if (thread == kManyRowsCopying) {
      many_rows::copy_rows<kFp4>(tiles, memory);
    }
    __syncwarp();
  }
  many_rows::meet_pair();  // until then the other one arrives here, and copies
#endif
}

}  // namespace dgmoe
