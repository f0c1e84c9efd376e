// The kernel before those of 2-CTA clusters: one CTA lists the tiles, and the others prepare the
// rows of a, a slice of an M block at a time.
#pragma once

#include <cub/block/block_scan.cuh>

#include "../../common/scan.cuh"
#include "scheduler.cuh"

namespace dgmoe {
namespace sm90 {

// Of a masked call the first M block of each expert, and their number. One warp calls.
__device__ __forceinline__ void count_m_blocks(const MxClusterPlan& p, int32_t* first) {
  const int lane = threadIdx.x % 32;
  int32_t sum = 0;
  for (int32_t base = 0; base < p.experts; base += 32) {
    const int32_t e = base + lane;
    const int64_t rows = valid_rows(p, e < p.experts ? p.info[e] : 0);
    const auto own = static_cast<int32_t>((rows + kBlockM - 1) / kBlockM);
    const int32_t inclusive = warp_inclusive_sum(own);
    if (e < p.experts) first[e] = sum + inclusive - own;
    sum += __shfl_sync(0xffffffffu, inclusive, 31);
  }
  if (lane == 0) first[p.experts] = sum;
}

// Valid rows of an M block of contiguous segments; none in one of padding. The whole warp calls.
__device__ __forceinline__ int32_t rows_of_m_block(const MxClusterPlan& p, int64_t m_block) {
  int32_t rows = 0;
#pragma unroll
  for (int i = 0; i < kBlockM / 32; ++i) {
    const int64_t at = m_block * kBlockM + i * 32 + threadIdx.x % 32;
    rows += __popc(__ballot_sync(0xffffffffu, at < p.m && __ldg(p.info + at) >= 0));
  }
  return rows;
}

// Where the rows of an M block are. The whole warp calls.
__device__ __forceinline__ WorkTile find_m_block(const MxClusterPlan& p, const int32_t* first,
                                                 int32_t m_block) {
  WorkTile tile{};
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

struct Max {
  __device__ __forceinline__ int32_t operator()(int32_t x, int32_t y) const { return max(x, y); }
};

using BlockScan = cub::BlockScan<int32_t, kPrepareThreads>;

struct ListStorage {
  BlockScan::TempStorage sum, last;
  int32_t rows[kPrepareThreads + 1], experts[kPrepareThreads + 1];  // [0]: the M block before
};

// Tiles of slabs. Where a slab's M blocks do not fill whole tiles, its first tile has fewer: the
// last M block may be ragged, and takes nearly as long alone as together with a full one.
template <int kBlocksM>
__device__ __forceinline__ int32_t list_slabs(const MxClusterPlan& p, ListStorage& storage) {
  int32_t tiles = 0;
  int32_t m_blocks = 0;
  for (int32_t base = 0; base < p.experts; base += kPrepareThreads) {
    const int32_t e = base + threadIdx.x;
    const int64_t rows = valid_rows(p, e < p.experts ? p.info[e] : 0);
    const auto own_m_blocks = static_cast<int32_t>((rows + kBlockM - 1) / kBlockM);
    const int32_t own = (own_m_blocks + kBlocksM - 1) / kBlocksM;
    int32_t tile, m_block, more_tiles, more_m_blocks;
    BlockScan(storage.sum).ExclusiveSum(own, tile, more_tiles);
    BlockScan(storage.last).ExclusiveSum(own_m_blocks, m_block, more_m_blocks);
    int32_t first = 0;  // M block of the tile, within the slab
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

// Valid rows of an M block, counted by one thread.
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

// Tiles of contiguous segments: consecutive M blocks of an expert are one tile where all but the
// last are full. Counted from the last M block on, so that the smaller tile is the first, as in
// slabs.
template <int kBlocksM>
__device__ __forceinline__ int32_t list_segments(const MxClusterPlan& p, ListStorage& storage) {
  const int thread = threadIdx.x;
  const auto m_blocks = static_cast<int32_t>((p.m + kBlockM - 1) / kBlockM);
  int32_t tiles = 0;
  int32_t run = 0;  // index where the expert's run of M blocks began, counted from the last M block
  if (thread == 0) storage.rows[0] = 0, storage.experts[0] = -1;
  for (int32_t base = 0; base < m_blocks; base += kPrepareThreads) {
    const int32_t index = base + thread;
    const int32_t m_block = m_blocks - 1 - index;
    const int32_t rows = m_block >= 0 ? rows_of_segment(p, m_block) : 0;
    const int32_t expert = rows > 0 ? p.info[int64_t{m_block} * kBlockM] : -1;
    storage.rows[thread + 1] = rows;
    storage.experts[thread + 1] = expert;
    __syncthreads();
    const bool continues =
        rows == kBlockM && storage.rows[thread] > 0 && storage.experts[thread] == expert;
    int32_t begin, last_begin, tile, more;
    BlockScan(storage.last).InclusiveScan(continues ? -1 : index, begin, Max{}, last_begin);
    const int32_t place = rows > 0 ? (index - max(run, begin)) % kBlocksM : -1;  // in its tile
    BlockScan(storage.sum).ExclusiveSum(place == 0, tile, more);
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
      storage.rows[0] = storage.rows[kPrepareThreads];
      storage.experts[0] = storage.experts[kPrepareThreads];
    }
    __syncthreads();
  }
  return tiles;
}

template <int kBlocksM>
__device__ __forceinline__ void list_tiles(const MxClusterPlan& p, ListStorage& storage) {
  const int32_t tiles =
      p.masked ? list_slabs<kBlocksM>(p, storage) : list_segments<kBlocksM>(p, storage);
  if (threadIdx.x == 0) *p.tiles = make_int4(tiles, 0, 0, 0);
}

// The kernel's body. `prepare` is given an M block and which of its slices; the slice may be empty.
// `first_m_blocks` is shared memory of experts + 1 values in masked calls.
template <int kBlocksM, typename Prepare>
__device__ __forceinline__ void prepare_m_blocks(const MxClusterPlan& p, ListStorage& storage,
                                                 int32_t* first_m_blocks, Prepare prepare) {
  if (blockIdx.x == 0) return list_tiles<kBlocksM>(p, storage);
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

}  // namespace sm90
}  // namespace dgmoe
