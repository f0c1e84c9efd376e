// Of kernels whose blocks work in pairs: their plan, which rows of a are prepared and copied together,
// and the list of tiles.
//
// A pair has 256 rows of a weight and up to kBlocksM m_blocks of rows of a. A first kernel prepares these
// rows and lists the tiles, and a second one multiplies.
#pragma once

#include <cub/block/block_scan.cuh>

#include "mx_common.cuh"
#include "ptx.cuh"

namespace dgmoe {

struct MxClusterPlan : MxPlan {
  uint8_t* rows;  // of a, prepared: m_blocks, and in them steps of some columns
  // mx_large_m.cuh only: of a m_block, kSlicesPerBlockM, whether something in it has no place in bf16.
  int32_t* flags;
  int4* tiles;  // x of the first: how many follow; then expert, row of a, rows and m_block of each
};

constexpr int kMathWarpgroups = 2;  // of four warps that multiply, each 64 rows of the weight
constexpr int kWeightProducerThreads = 64;  // threads that copy weights
constexpr int kCtaThreads = 128 * (kMathWarpgroups + 1);
constexpr int kBlockN = 64 * kMathWarpgroups;
constexpr int kClusterN = 256;       // rows of the weight that a pair of blocks has
constexpr int kBlockM = 128;         // rows of a that are prepared together
constexpr int kSlicesPerBlockM = 4;  // of a m_block, that are prepared by a block each
constexpr int kSliceM = 32;          // rows in which a tile is copied
constexpr int kPrepareThreads = 128;
static_assert(kClusterN == 2 * kBlockN);
static_assert(kSliceM == kBlockM / kSlicesPerBlockM);

namespace mx_cluster {

struct Tile {
  int32_t index;  // of all tiles; past the last one where there is none
  int32_t expert, first_weight;
  int32_t m_block, rows;
  int64_t row, scale_row;
};

template <int kBlocksM>  // of a tile, at most
struct Tiles {
  const MxClusterPlan& p;
  int32_t row_tiles, weight_tiles;
  int block;  // of the pair, which shares its tiles

  static constexpr int kTogether =
      1024 / (kBlocksM * kBlockM);  // tiles of rows that share the cache

  __device__ __forceinline__ explicit Tiles(const MxClusterPlan& plan)
      : p(plan),
        row_tiles(plan.tiles->x),
        weight_tiles((plan.n + kClusterN - 1) / kClusterN),
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
    tile.first_weight = weight_tile * kClusterN + block * kBlockN;
    tile.expert = found.x;
    tile.scale_row = found.y;
    tile.row = (p.masked ? found.x * p.m : 0) + found.y;
    tile.rows = found.z;
    tile.m_block = found.w;
    return tile;
  }
};

// Of a masked call the first m_block of each expert, and their number. A warp calls together.
__device__ __forceinline__ void count_m_blocks(const MxClusterPlan& p, int32_t* first) {
  const int lane = threadIdx.x % 32;
  int32_t sum = 0;
  for (int32_t base = 0; base < p.experts; base += 32) {
    const int32_t e = base + lane;
    const int64_t rows = valid_rows(p, e < p.experts ? p.info[e] : 0);
    int32_t upto = static_cast<int32_t>((rows + kBlockM - 1) / kBlockM);
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

// Rows of a m_block of segments; none in one of padding. A warp calls together.
__device__ __forceinline__ int32_t rows_of_m_block(const MxClusterPlan& p, int64_t m_block) {
  int32_t rows = 0;
#pragma unroll
  for (int i = 0; i < kBlockM / 32; ++i) {
    const int64_t at = m_block * kBlockM + i * 32 + threadIdx.x % 32;
    rows += __popc(__ballot_sync(0xffffffffu, at < p.m && __ldg(p.info + at) >= 0));
  }
  return rows;
}

// The rows of a m_block. A warp calls together.
__device__ __forceinline__ Tile find_m_block(const MxClusterPlan& p, const int32_t* first,
                                             int32_t m_block) {
  Tile tile{};
  tile.m_block = m_block;
  if (!p.masked) {
    tile.row = tile.scale_row = int64_t{m_block} * kBlockM;
    tile.rows = rows_of_m_block(p, m_block);
    return tile;
  }
  int32_t low = 0;
  int32_t high = p.experts;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (first[middle] <= m_block ? low : high) = middle;
  }
  tile.expert = low;
  tile.scale_row = int64_t{m_block - first[low]} * kBlockM;
  tile.row = low * p.m + tile.scale_row;
  const int64_t count = valid_rows(p, p.info[low]);
  tile.rows = static_cast<int32_t>(min(count - tile.scale_row, int64_t{kBlockM}));
  return tile;
}

struct Later {
  __device__ __forceinline__ int32_t operator()(int32_t x, int32_t y) const { return max(x, y); }
};

using Scan = cub::BlockScan<int32_t, kPrepareThreads>;

struct ListMemory {
  Scan::TempStorage sum, last;
  int32_t rows[kPrepareThreads + 1],
      experts[kPrepareThreads + 1];  // of m_blocks, the one before first
};

// Of slabs: where their m_blocks are no whole tiles, the first tile is the smaller one, since rows that
// are left over take nearly as long by themselves as with a m_block more.
template <int kBlocksM>
__device__ __forceinline__ int32_t list_slabs(const MxClusterPlan& p, ListMemory& memory) {
  int32_t tiles = 0;
  int32_t m_blocks = 0;
  for (int32_t base = 0; base < p.experts; base += kPrepareThreads) {
    const int32_t e = base + threadIdx.x;
    const int64_t rows = valid_rows(p, e < p.experts ? p.info[e] : 0);
    const auto own_m_blocks = static_cast<int32_t>((rows + kBlockM - 1) / kBlockM);
    const int32_t own = (own_m_blocks + kBlocksM - 1) / kBlocksM;
    int32_t tile, m_block, more_tiles, more_m_blocks;
    Scan(memory.sum).ExclusiveSum(own, tile, more_tiles);
    Scan(memory.last).ExclusiveSum(own_m_blocks, m_block, more_m_blocks);
    int32_t first = 0;  // m_block of the tile
    int32_t after = own_m_blocks - (own - 1) * kBlocksM;
    for (int32_t i = 0; i < own; ++i, first = after, after += kBlocksM) {
      const int64_t end = min(rows, int64_t{after} * kBlockM);
      p.tiles[1 + tiles + tile + i] =
          make_int4(e, first * kBlockM, static_cast<int32_t>(end - first * kBlockM),
                    m_blocks + m_block + first);
    }
    tiles += more_tiles;
    m_blocks += more_m_blocks;
    __syncthreads();
  }
  return tiles;
}

// Rows of a m_block, as one thread counts them.
__device__ __forceinline__ int32_t rows_of_segment(const MxClusterPlan& p, int32_t m_block) {
  const int32_t* from = p.info + int64_t{m_block} * kBlockM;
  const auto here = static_cast<int32_t>(min(p.m - int64_t{m_block} * kBlockM, int64_t{kBlockM}));
  int32_t rows = 0;
  if (here == kBlockM && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll 8
    for (int i = 0; i < kBlockM / 4; ++i) {
      const int4 four = __ldg(reinterpret_cast<const int4*>(from) + i);
      rows += (four.x >= 0) + (four.y >= 0) + (four.z >= 0) + (four.w >= 0);
    }
    return rows;
  }
#pragma unroll 8
  for (int i = 0; i < here; ++i) rows += __ldg(from + i) >= 0;
  return rows;
}

// Of segments: m_blocks of an expert in a row are a tile, where all but the last are full. They are
// counted from the last one on, so that the smaller tile is the first, as in slabs.
template <int kBlocksM>
__device__ __forceinline__ int32_t list_segments(const MxClusterPlan& p, ListMemory& memory) {
  const int thread = threadIdx.x;
  const auto m_blocks = static_cast<int32_t>((p.m + kBlockM - 1) / kBlockM);
  int32_t tiles = 0;
  int32_t run = 0;  // the index where the run of an expert began, counted from the last m_block
  if (thread == 0) memory.rows[0] = 0, memory.experts[0] = -1;
  for (int32_t base = 0; base < m_blocks; base += kPrepareThreads) {
    const int32_t index = base + thread;
    const int32_t m_block = m_blocks - 1 - index;
    const int32_t rows = m_block >= 0 ? rows_of_segment(p, m_block) : 0;
    const int32_t expert = rows > 0 ? p.info[int64_t{m_block} * kBlockM] : -1;
    memory.rows[thread + 1] = rows;
    memory.experts[thread + 1] = expert;
    __syncthreads();
    const bool goes_on =
        rows == kBlockM && memory.rows[thread] > 0 && memory.experts[thread] == expert;
    int32_t begin, last_begin, tile, more;
    Scan(memory.last).InclusiveScan(goes_on ? -1 : index, begin, Later{}, last_begin);
    const int32_t place = rows > 0 ? (index - max(run, begin)) % kBlocksM : -1;  // in a tile
    Scan(memory.sum).ExclusiveSum(place == 0, tile, more);
    int4* const to = p.tiles + 1 + tiles + tile;
    if (place == 0) *to = make_int4(expert, m_block * kBlockM, rows, m_block);
    run = max(run, last_begin);
    tiles += more;
#pragma unroll
    for (int i = 1; i < kBlocksM; ++i) {
      __syncthreads();
      if (place == i) to[-1] = make_int4(expert, m_block * kBlockM, to[-1].z + kBlockM, m_block);
    }
    if (thread == 0) {
      memory.rows[0] = memory.rows[kPrepareThreads];
      memory.experts[0] = memory.experts[kPrepareThreads];
    }
    __syncthreads();
  }
  return tiles;
}

template <int kBlocksM>
__device__ __forceinline__ void list_tiles(const MxClusterPlan& p, ListMemory& memory) {
  const int32_t tiles =
      p.masked ? list_slabs<kBlocksM>(p, memory) : list_segments<kBlocksM>(p, memory);
  if (threadIdx.x == 0) *p.tiles = make_int4(tiles, 0, 0, 0);
}

// The first kernel: one block lists the tiles; the others prepare a slice of a m_block each. `prepare`
// is given the m_block and which slice of it; the m_block may have no rows there.
template <int kBlocksM, typename Prepare>
__device__ __forceinline__ void prepare_m_blocks(const MxClusterPlan& p, ListMemory& memory,
                                                 int32_t* first_m_blocks, Prepare prepare) {
  if (blockIdx.x == 0) return list_tiles<kBlocksM>(p, memory);
  if (p.masked) {
    if (threadIdx.x < 32) count_m_blocks(p, first_m_blocks);
    __syncthreads();
  }
  const int32_t m_blocks =
      p.masked ? first_m_blocks[p.experts] : static_cast<int32_t>((p.m + kBlockM - 1) / kBlockM);
  for (int32_t i = blockIdx.x - 1; i < m_blocks * kSlicesPerBlockM; i += gridDim.x - 1) {
    prepare(find_m_block(p, first_m_blocks, i / kSlicesPerBlockM), i % kSlicesPerBlockM);
  }
}

}  // namespace mx_cluster
}  // namespace dgmoe
