// Of many_rows.cuh: its plan, how values become bf16, what tile comes next, and rows of a.
#pragma once

#include "../common/numerics.h"
#include "many_rows_machine.cuh"
#include "mx_product.cuh"

namespace dgmoe {

struct ManyRowsPlan : MxPlan {
  uint8_t* wide;  // rows of a as bf16: tiles of rows, steps of 64 columns, rows of 128 bytes
  int32_t*
      flags;  // of a tile of rows, kManyRowsSlices: whether something in it has no place in bf16
};

constexpr int kManyRowsGroups = 2;                    // of four warps that multiply
constexpr int kManyRowsBlocks = 4 / kManyRowsGroups;  // of 64 rows of the weight that each has
constexpr int kManyRowsThreads = 128 * (kManyRowsGroups + 1);
constexpr int kManyRowsSlices = 4;
constexpr int kWidenThreads = 128;
constexpr int kManyRowsWeights = 256;
constexpr int kManyRowsColumns = 64;

template <bool kFp4, int kRows>
struct ManyRowsShape {
  static constexpr int kRowBytes = kFp4 ? 32 : 64;                 // of a weight's row in a step
  static constexpr int kWideBytes = kRows * kManyRowsColumns * 2;  // of rows of a in a step
  static constexpr int kStageBytes = kWideBytes + kManyRowsWeights * kRowBytes;
  static constexpr int kStages = kFp4 ? 6 : 5;
  static constexpr int kPitch = 64 * 2 + 16;                   // of a row of the result, in bytes
  static constexpr int kResultRows = kRows < 64 ? kRows : 64;  // that are exchanged at once
  static constexpr int kResult = kStages * kStageBytes;
  static constexpr int kBarriers = kResult + kManyRowsGroups * kResultRows * kPitch;
  static constexpr int kFirst = kBarriers + 2 * kStages * 8;

  static constexpr int shared_bytes(int experts) { return 1024 + kFirst + (experts + 1) * 4; }
  static constexpr int widen_shared_bytes(int experts) { return kWideBytes + (experts + 1) * 4; }
  // Of tiles of rows, at most.
  static constexpr int64_t most_tiles(bool masked, int64_t experts, int64_t m) {
    return (masked ? experts : 1) * ((m + kRows - 1) / kRows);
  }
};

namespace many_rows {

// ---- values ----

__device__ __forceinline__ uint32_t scaled(uint32_t pair, uint32_t factor) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor));
  return product;
}

// Values' bits as bf16 are 2^-120 (e4m3) or 2^-126 (e2m1) of them, subnormal ones included. A
// factor 2^(e - 127 + 111) then leaves 2^-9 or 2^-15 of the scaled value.
constexpr uint32_t kBias = 111u * 0x01010101u;
constexpr uint32_t kLowest = 16u * 0x01010101u;
constexpr uint32_t kSigns = 0x80008000u;

// bf16 pairs of bytes 0 and 2, and of bytes 1 and 3. `nan` gathers bit 11 of NaN magnitudes.
__device__ __forceinline__ void widen_e4m3(uint32_t word, uint32_t factor, uint32_t& even,
                                           uint32_t& odd, uint32_t& nan) {
  constexpr uint32_t kMagnitudes = 0x07f007f0u;
  const uint32_t low = word << 4 & kMagnitudes;
  const uint32_t high = word >> 4 & kMagnitudes;
  nan |= (low + 0x00100010u) | (high + 0x00100010u);
  even = scaled(low | (word << 8 & kSigns), factor);
  odd = scaled(high | (word & kSigns), factor);
}
constexpr uint32_t kNan = 0x08000800u;

// bf16 pairs of codes i and i + 4, and of codes i + 1 and i + 5, of eight in a word.
template <int i>
__device__ __forceinline__ void widen_e2m1(uint32_t word, uint32_t factor, uint32_t& even,
                                           uint32_t& odd) {
  constexpr uint32_t kMagnitudes = 0x01c001c0u;
  if constexpr (i == 0) {
    even = scaled((word << 6 & kMagnitudes) | (word << 12 & kSigns), factor);
    odd = scaled((word << 2 & kMagnitudes) | (word << 8 & kSigns), factor);
  } else {
    even = scaled((word >> 2 & kMagnitudes) | (word << 4 & kSigns), factor);
    odd = scaled((word >> 6 & kMagnitudes) | (word & kSigns), factor);
  }
}

// Whether a word of scales holds one that a factor cannot stand for.
__device__ __forceinline__ bool out_of_range(uint32_t word) {
  return ((word - kLowest) & 0x80808080u) != 0;
}
// bf16 2^(e - 16) twice, for the byte that the selector takes, 4 * 16 + 4 * 4096 its other digits.
__device__ __forceinline__ uint32_t factor_of(uint32_t word, uint32_t selector) {
  return __byte_perm(word + kBias, 0, selector) >> 1;
}
__device__ __forceinline__ uint32_t selector_of(int byte) { return 0x0404u + byte * 0x1010u; }

// Of a scale out of range: whether the values below it need it.
__device__ __forceinline__ bool needs_scale(uint32_t word, int byte, uint32_t magnitudes) {
  const uint32_t e = word >> 8 * byte & 255u;
  return e > 143 || (e < 16 && magnitudes != 0);
}

// ---- tiles ----

struct Tile {
  int32_t index;  // of all tiles; past the last one where there is none
  int32_t expert, first_weight;
  int32_t row_tile, rows;
  int64_t row, scale_row;
};

template <int kRows>
struct Tiles {
  const ManyRowsPlan& p;
  const int32_t* first;  // tile of rows of each expert, and their number; masked only
  int32_t row_tiles, weight_tiles;

  static constexpr int kTogether = 1024 / kRows;  // tiles of rows that share the cache

  // Finds the rows of a tile of rows; none in a tile of padding. A warp calls together.
  __device__ __forceinline__ void find_rows(Tile& tile) const {
    if (p.masked) {
      int32_t low = 0;
      int32_t high = p.experts;
      while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        (first[middle] <= tile.row_tile ? low : high) = middle;
      }
      tile.expert = low;
      const int64_t inner = int64_t{tile.row_tile - first[low]} * kRows;
      const int64_t count = min(int64_t{p.info[low]}, p.m);
      tile.rows = static_cast<int32_t>(min(count - inner, int64_t{kRows}));
      tile.row = low * p.m + inner;
      tile.scale_row = inner;
      return;
    }
    tile.row = tile.scale_row = int64_t{tile.row_tile} * kRows;
    tile.rows = 0;
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i) {
      const int64_t at = tile.row + i * 32 + threadIdx.x % 32;
      tile.rows += __popc(__ballot_sync(0xffffffffu, at < p.m && p.info[at] >= 0));
    }
    tile.expert = p.info[tile.row];
  }
  // Finds the first tile with rows from `index` on, in steps of the grid.
  __device__ __forceinline__ Tile find(int32_t index) const {
    Tile tile{};
    for (tile.index = index; there(tile); tile.index += gridDim.x) {
      const int32_t bundle = tile.index / (kTogether * weight_tiles);
      const int32_t width = min(kTogether, row_tiles - bundle * kTogether);
      const int32_t local = tile.index - bundle * kTogether * weight_tiles;
      const int32_t weight_tile = local / width;
      tile.row_tile = bundle * kTogether + local - weight_tile * width;
      tile.first_weight = weight_tile * kManyRowsWeights;
      find_rows(tile);
      if (tile.rows > 0) break;
    }
    return tile;
  }
  __device__ __forceinline__ bool there(const Tile& tile) const {
    return tile.index < row_tiles * weight_tiles;
  }
};

// The first tile of rows of each expert of a masked call, and their number. A warp calls together.
template <int kRows>
__device__ __forceinline__ void count_tiles(const ManyRowsPlan& p, int32_t* first) {
  const int lane = threadIdx.x % 32;
  int32_t sum = 0;
  for (int32_t base = 0; base < p.experts; base += 32) {
    const int32_t e = base + lane;
    const int64_t count = e < p.experts ? p.info[e] : 0;
    const int64_t rows = count < 0 ? 0 : count < p.m ? count : p.m;
    int32_t upto = static_cast<int32_t>((rows + kRows - 1) / kRows);
    const int32_t own = upto;
    for (int offset = 1; offset < 32; offset *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, upto, offset);
      if (lane >= offset) upto += other;
    }
    if (e < p.experts) first[e] = sum + upto - own;
    sum += __shfl_sync(0xffffffffu, upto, 31);
  }
  if (lane == 0) first[p.experts] = sum;
}

// ---- rows of a ----

// Widens a slice of a tile's columns.
template <bool kFp4, bool kNarrow, int kRows>
__device__ __forceinline__ void widen_rows(const ManyRowsPlan& p, const Tile& tile, int slice,
                                           uint8_t* memory) {
  using Shape = ManyRowsShape<kFp4, kRows>;
  constexpr int kMine = kRows / 32;
  const int thread = threadIdx.x;
  const int c = thread % 4;
  const int r = thread / 4;
  const int32_t steps = p.k / kManyRowsColumns;
  const uint8_t* rows = p.a + tile.row * p.k + c * 16;
  const int32_t* scales =
      p.a_scale + (p.masked ? tile.expert * p.a_scale_batch : 0) + tile.scale_row * p.a_scale_row;
  uint8_t* to = p.wide + int64_t{tile.row_tile} * steps * Shape::kWideBytes;
  uint32_t nan = 0;
  bool bad = false;
  for (int32_t step = slice; step < steps; step += kManyRowsSlices) {
    constexpr int kSpan = kNarrow ? 2 : 8;  // steps of a word of scales
    const int byte = kNarrow ? step % 2 * 2 + c / 2 : step / 2 % 4;
    const uint32_t selector = selector_of(byte);
    uint4 raw[kMine];
    uint32_t words[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const uint32_t row = min(r + i * 32, tile.rows - 1);
      raw[i] = __ldg(reinterpret_cast<const uint4*>(rows + row * p.k + step * 64));
      words[i] = __ldg(scales + row * p.a_scale_row + step / kSpan * p.a_scale_word);
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      uint32_t pairs[8];
      uint4 v = raw[i];
      bad |= out_of_range(words[i]) &&
             needs_scale(words[i], byte, (v.x | v.y | v.z | v.w) & 0x7f7f7f7fu);
      if constexpr (kFp4) {
        v = make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                       __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632));
      }
      const uint32_t factor = factor_of(words[i], selector);
      widen_e4m3(v.x, factor, pairs[0], pairs[1], nan);
      widen_e4m3(v.y, factor, pairs[2], pairs[3], nan);
      widen_e4m3(v.z, factor, pairs[4], pairs[5], nan);
      widen_e4m3(v.w, factor, pairs[6], pairs[7], nan);
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        *reinterpret_cast<uint32_t*>(memory + (r + i * 32) * 128 + ((q ^ r % 8) << 4) + c * 4) =
            pairs[q];
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Shape::kWideBytes / 16 / kWidenThreads; ++i) {
      const int at = (thread + i * kWidenThreads) * 16;
      *reinterpret_cast<uint4*>(to + int64_t{step} * Shape::kWideBytes + at) =
          *reinterpret_cast<const uint4*>(memory + at);
    }
    __syncthreads();
  }
  const int any = __syncthreads_or(bad || (nan & kNan) != 0);
  if (thread == 0) p.flags[tile.row_tile * kManyRowsSlices + slice] = any;
}

// The warps that copy them, and rows of weights, to shared memory.
template <bool kFp4, int kRows>
__device__ __forceinline__ void copy_rows(const Tiles<kRows>& tiles, uint32_t memory) {
  using Shape = ManyRowsShape<kFp4, kRows>;
  const ManyRowsPlan& p = tiles.p;
  constexpr int kChunks = Shape::kRowBytes / 16;
  constexpr int kAtOnce = 128 / kChunks;
  const int thread = threadIdx.x % 128;
  const int32_t row_bytes = kFp4 ? p.k / 2 : p.k;
  const int32_t steps = p.k / kManyRowsColumns;
  int slot = 0;
  uint32_t round = 0;
  for (Tile tile = tiles.find(blockIdx.x); tiles.there(tile);
       tile = tiles.find(tile.index + gridDim.x)) {
    const uint8_t* wide = p.wide + int64_t{tile.row_tile} * steps * Shape::kWideBytes;
    const uint8_t* weights = p.b + int64_t{tile.expert} * p.n * row_bytes + thread % kChunks * 16;
    const int32_t first = tile.first_weight + thread / kChunks;
    for (int32_t step = 0; step < steps; ++step) {
      const uint32_t to = memory + slot * Shape::kStageBytes;
      const uint32_t full = memory + Shape::kBarriers + slot * 8;
      barrier_wait(full + Shape::kStages * 8, (round & 1) ^ 1);
      if (thread == 0) copy(to, wide, Shape::kWideBytes, full);
#pragma unroll
      for (int i = 0; i < kManyRowsWeights / kAtOnce; ++i) {
        const uint32_t row = min(first + i * kAtOnce, p.n - 1);
        copy16_async(to + Shape::kWideBytes + (thread + i * 128) * 16, weights + row * row_bytes);
      }
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
      wide += Shape::kWideBytes;
      weights += Shape::kRowBytes;
      if (++slot == Shape::kStages) slot = 0, ++round;
    }
  }
}

}  // namespace many_rows
}  // namespace dgmoe
