// Of many_rows.cuh: its plan, how values become bf16, what tile comes next, and rows of a.
#pragma once

#include "../common/numerics.h"
#include "many_rows_machine.cuh"
#include "mx_product.cuh"

namespace dgmoe {

struct ManyRowsPlan : MxPlan {
  uint8_t* wide;   // rows of a as bf16: units, steps of 64 columns, rows of 128 bytes
  int32_t* flags;  // of a unit, kManyRowsSlices: whether something in it has no place in bf16
  int4* tiles;     // x of the first: how many follow; then expert, row of a, rows and unit of each
};

constexpr int kManyRowsGroups = 2;    // of four warps that multiply, each 64 rows of the weight
constexpr int kManyRowsCopying = 64;  // threads that copy weights
constexpr int kManyRowsThreads = 128 * (kManyRowsGroups + 1);
constexpr int kManyRowsBlock = 64 * kManyRowsGroups;
constexpr int kManyRowsWeights = 256;  // rows of the weight that a pair of blocks has
constexpr int kManyRowsColumns = 64;
constexpr int kManyRowsUnit = 128;  // rows of a that are widened together
constexpr int kManyRowsUnits = 2;   // of a tile
constexpr int kManyRowsSlices = 4;  // of a unit, that are widened by a block each
constexpr int kManyRowsStep = 32;   // rows in which a tile is copied
constexpr int kWidenThreads = 128;
constexpr int kManyRowsTile = kManyRowsUnits * kManyRowsUnit;
constexpr int kManyRowsWideBytes = kManyRowsUnit * kManyRowsColumns * 2;  // of a unit in a step
static_assert(kManyRowsWeights == 2 * kManyRowsBlock);
static_assert(kManyRowsStep == kManyRowsUnit / kManyRowsSlices);

template <bool kFp4>
struct ManyRowsShape {
  static constexpr int kRowBytes = kFp4 ? 32 : 64;  // of a weight's row in a step
  static constexpr int kWeights = kManyRowsTile * kManyRowsColumns * 2;  // they follow rows of a
  static constexpr int kStageBytes = kWeights + kManyRowsBlock * kRowBytes;
  static constexpr int kStages = 5;
  static constexpr int kPitch = 64 * 2 + 16;  // of a row of the result, in bytes
  static constexpr int kResult = kStages * kStageBytes;
  static constexpr int kFull = kResult + kManyRowsGroups * 64 * kPitch;  // barriers
  static constexpr int kEmpty = kFull + kStages * 8;  // of rows of a; for weights there are others
  static constexpr int kBytes = 1024 + kEmpty + kStages * 8;
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

// bf16 pairs of bytes 0 and 2, and of bytes 1 and 3. `largest` gathers magnitudes, in 16 bits each.
__device__ __forceinline__ void widen_e4m3(uint32_t word, uint32_t factor, uint32_t& even,
                                           uint32_t& odd, uint32_t& largest) {
  constexpr uint32_t kMagnitudes = 0x07f007f0u;
  const uint32_t low = word << 4 & kMagnitudes;
  const uint32_t high = word >> 4 & kMagnitudes;
  largest = __vimax3_u16x2(largest, low, high);
  even = scaled(low | (word << 8 & kSigns), factor);
  odd = scaled(high | (word & kSigns), factor);
}
__device__ __forceinline__ bool has_nan(uint32_t largest) {
  return ((largest + 0x00100010u) & 0x08000800u) != 0;
}

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
// bf16 2^(e - 16) twice, for the byte that the selector takes.
__device__ __forceinline__ uint32_t factor_of(uint32_t word, uint32_t selector) {
  uint32_t twice;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(twice) : "r"(word + kBias), "r"(selector));
  return twice >> 1;
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
  int32_t unit, rows;
  int64_t row, scale_row;
};

struct Tiles {
  const ManyRowsPlan& p;
  int32_t row_tiles, weight_tiles;
  int block;  // of the pair, which shares its tiles

  static constexpr int kTogether = 1024 / kManyRowsTile;  // tiles of rows that share the cache

  __device__ __forceinline__ explicit Tiles(const ManyRowsPlan& plan)
      : p(plan),
        row_tiles(plan.tiles->x),
        weight_tiles((plan.n + kManyRowsWeights - 1) / kManyRowsWeights),
        block(block_of_pair()) {}
  __device__ __forceinline__ bool there(const Tile& tile) const {
    return tile.index < row_tiles * weight_tiles;
  }
  __device__ __forceinline__ Tile begin() const { return find(blockIdx.x / 2); }
  __device__ __forceinline__ Tile after(const Tile& tile) const {
    return find(tile.index + gridDim.x / 2);
  }
  __device__ __forceinline__ Tile find(int32_t index) const {
    Tile tile{};
    tile.index = index;
    if (!there(tile)) return tile;
    const int32_t bundle = index / (kTogether * weight_tiles);
    const int32_t width = min(kTogether, row_tiles - bundle * kTogether);
    const int32_t local = index - bundle * kTogether * weight_tiles;
    const int32_t weight_tile = local / width;
    const int4 found = __ldg(p.tiles + 1 + bundle * kTogether + local - weight_tile * width);
    tile.first_weight = weight_tile * kManyRowsWeights + block * kManyRowsBlock;
    tile.expert = found.x;
    tile.scale_row = found.y;
    tile.row = (p.masked ? found.x * p.m : 0) + found.y;
    tile.rows = found.z;
    tile.unit = found.w;
    return tile;
  }
};

// ---- rows of a ----

// Of a masked call the first unit of each expert, and their number. A warp calls together.
__device__ __forceinline__ void count_units(const ManyRowsPlan& p, int32_t* first) {
  const int lane = threadIdx.x % 32;
  int32_t sum = 0;
  for (int32_t base = 0; base < p.experts; base += 32) {
    const int32_t e = base + lane;
    const int64_t rows = valid_rows(p, e < p.experts ? p.info[e] : 0);
    int32_t upto = static_cast<int32_t>((rows + kManyRowsUnit - 1) / kManyRowsUnit);
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

// Rows of a unit of segments; none in one of padding. A warp calls together.
__device__ __forceinline__ int32_t rows_of_unit(const ManyRowsPlan& p, int64_t unit) {
  int32_t rows = 0;
#pragma unroll
  for (int i = 0; i < kManyRowsUnit / 32; ++i) {
    const int64_t at = unit * kManyRowsUnit + i * 32 + threadIdx.x % 32;
    rows += __popc(__ballot_sync(0xffffffffu, at < p.m && __ldg(p.info + at) >= 0));
  }
  return rows;
}

// The rows of a unit. A warp calls together.
__device__ __forceinline__ Tile find_unit(const ManyRowsPlan& p, const int32_t* first,
                                          int32_t unit) {
  Tile tile{};
  tile.unit = unit;
  if (!p.masked) {
    tile.row = tile.scale_row = int64_t{unit} * kManyRowsUnit;
    tile.rows = rows_of_unit(p, unit);
    return tile;
  }
  int32_t low = 0;
  int32_t high = p.experts;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (first[middle] <= unit ? low : high) = middle;
  }
  tile.expert = low;
  tile.scale_row = int64_t{unit - first[low]} * kManyRowsUnit;
  tile.row = low * p.m + tile.scale_row;
  const int64_t count = min(int64_t{p.info[low]}, p.m);
  tile.rows = static_cast<int32_t>(min(count - tile.scale_row, int64_t{kManyRowsUnit}));
  return tile;
}

// Widens a slice of a unit: 32 of its rows, of which a warp has 8, in some steps at once.
template <bool kFp4, bool kNarrow>
__device__ __forceinline__ void widen_rows(const ManyRowsPlan& p, const Tile& tile, int slice,
                                           uint8_t* memory) {
  constexpr int kAtOnce = 4;
  constexpr int kSpan = kNarrow ? 2 : 8;  // steps of a word of scales
  constexpr int kWords = kAtOnce > kSpan ? kAtOnce / kSpan : 1;
  constexpr int kPart = 8 * kManyRowsColumns * 2;  // bytes of a warp's rows in a step
  const int lane = threadIdx.x % 32;
  const int c = lane % 4;
  const int r = lane / 4;
  const int first = slice * (kManyRowsUnit / kManyRowsSlices) + threadIdx.x / 32 * 8;
  const uint32_t row = min(first + r, tile.rows - 1);
  const int32_t steps = p.k / kManyRowsColumns;
  const auto* values = reinterpret_cast<const uint4*>(p.a + (tile.row + row) * p.k) + c;
  const int32_t* scales = p.a_scale + (p.masked ? tile.expert * p.a_scale_batch : 0) +
                          (tile.scale_row + row) * p.a_scale_row;
  uint8_t* mine = memory + threadIdx.x / 32 * kAtOnce * kPart;
  uint8_t* to = p.wide + int64_t{tile.unit} * steps * kManyRowsWideBytes + first * 128 + lane * 16;
  uint32_t largest = 0;
  bool bad = false;
  for (int32_t step = 0; step < steps; step += kAtOnce) {
    uint4 raw[kAtOnce];
    uint32_t words[kWords];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      raw[j] = __ldg(values + min(step + j, steps - 1) * 4);
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const int32_t word = min(step / kSpan + j, (steps - 1) / kSpan);
      words[j] = __ldg(scales + word * p.a_scale_word);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const uint32_t word = words[j / kSpan];
      const int byte = kNarrow ? j % 2 * 2 + c / 2 : (step + j) / 2 % 4;
      uint32_t pairs[8];
      uint4 v = raw[j];
      bad |= step + j < steps && out_of_range(word) &&
             needs_scale(word, byte, (v.x | v.y | v.z | v.w) & 0x7f7f7f7fu);
      if constexpr (kFp4) {
        v = make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                       __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632));
      }
      const uint32_t factor = factor_of(word, selector_of(byte));
      widen_e4m3(v.x, factor, pairs[0], pairs[1], largest);
      widen_e4m3(v.y, factor, pairs[2], pairs[3], largest);
      widen_e4m3(v.z, factor, pairs[4], pairs[5], largest);
      widen_e4m3(v.w, factor, pairs[6], pairs[7], largest);
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        *reinterpret_cast<uint32_t*>(mine + j * kPart + r * 128 + ((q ^ r) << 4) + c * 4) =
            pairs[q];
      }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (step + j < steps) {
#pragma unroll
        for (int i = 0; i < kPart; i += 32 * 16) {
          *reinterpret_cast<uint4*>(to + int64_t{step + j} * kManyRowsWideBytes + i) =
              *reinterpret_cast<const uint4*>(mine + j * kPart + lane * 16 + i);
        }
      }
    }
    __syncwarp();
  }
  const int any = __syncthreads_or(bad || has_nan(largest));
  if (threadIdx.x == 0) p.flags[tile.unit * kManyRowsSlices + slice] = any;
}

}  // namespace many_rows
}  // namespace dgmoe
