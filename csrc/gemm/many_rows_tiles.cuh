// Of many_rows.cuh: the list of its tiles of rows.
#pragma once

#include <cub/block/block_scan.cuh>

#include "many_rows_work.cuh"

namespace dgmoe {
namespace many_rows {

struct Later {
  __device__ __forceinline__ int32_t operator()(int32_t x, int32_t y) const { return max(x, y); }
};

using Scan = cub::BlockScan<int32_t, kWidenThreads>;

struct ListMemory {
  Scan::TempStorage sum, last;
  int32_t rows[kWidenThreads + 1], experts[kWidenThreads + 1];  // of units, the one before first
};

// Of slabs: tiles from the first row of each.
__device__ __forceinline__ int32_t list_slabs(const ManyRowsPlan& p, ListMemory& memory) {
  int32_t tiles = 0;
  int32_t units = 0;
  for (int32_t base = 0; base < p.experts; base += kWidenThreads) {
    const int32_t e = base + threadIdx.x;
    const int64_t rows = valid_rows(p, e < p.experts ? p.info[e] : 0);
    const auto own = static_cast<int32_t>((rows + kManyRowsTile - 1) / kManyRowsTile);
    int32_t tile, unit, more_tiles, more_units;
    Scan(memory.sum).ExclusiveSum(own, tile, more_tiles);
    Scan(memory.last)
        .ExclusiveSum(static_cast<int32_t>((rows + kManyRowsUnit - 1) / kManyRowsUnit), unit,
                      more_units);
    for (int32_t i = 0; i < own; ++i) {
      const int32_t row = i * kManyRowsTile;
      p.tiles[1 + tiles + tile + i] =
          make_int4(e, row, static_cast<int32_t>(min(rows - row, int64_t{kManyRowsTile})),
                    units + unit + i * kManyRowsUnits);
    }
    tiles += more_tiles;
    units += more_units;
    __syncthreads();
  }
  return tiles;
}

// Rows of a unit, as one thread counts them.
__device__ __forceinline__ int32_t rows_of_segment(const ManyRowsPlan& p, int32_t unit) {
  const int32_t* from = p.info + int64_t{unit} * kManyRowsUnit;
  const auto here =
      static_cast<int32_t>(min(p.m - int64_t{unit} * kManyRowsUnit, int64_t{kManyRowsUnit}));
  int32_t rows = 0;
  if (here == kManyRowsUnit && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll 8
    for (int i = 0; i < kManyRowsUnit / 4; ++i) {
      const int4 four = __ldg(reinterpret_cast<const int4*>(from) + i);
      rows += (four.x >= 0) + (four.y >= 0) + (four.z >= 0) + (four.w >= 0);
    }
    return rows;
  }
#pragma unroll 8
  for (int i = 0; i < here; ++i) rows += __ldg(from + i) >= 0;
  return rows;
}

// Of segments: units of an expert in a row are a tile, where all but the last are full.
__device__ __forceinline__ int32_t list_segments(const ManyRowsPlan& p, ListMemory& memory) {
  const int thread = threadIdx.x;
  const auto units = static_cast<int32_t>((p.m + kManyRowsUnit - 1) / kManyRowsUnit);
  int32_t tiles = 0;
  int32_t run = 0;  // the unit where the run of an expert began
  if (thread == 0) memory.rows[0] = 0, memory.experts[0] = -1;
  for (int32_t base = 0; base < units; base += kWidenThreads) {
    const int32_t unit = base + thread;
    const int32_t rows = unit < units ? rows_of_segment(p, unit) : 0;
    const int32_t expert = rows > 0 ? p.info[int64_t{unit} * kManyRowsUnit] : -1;
    memory.rows[thread + 1] = rows;
    memory.experts[thread + 1] = expert;
    __syncthreads();
    const bool goes_on =
        rows > 0 && memory.rows[thread] == kManyRowsUnit && memory.experts[thread] == expert;
    int32_t begin, last_begin, tile, more;
    Scan(memory.last).InclusiveScan(goes_on ? -1 : unit, begin, Later{}, last_begin);
    const int32_t place = rows > 0 ? (unit - max(run, begin)) % kManyRowsUnits : -1;  // in a tile
    Scan(memory.sum).ExclusiveSum(place == 0, tile, more);
    int4* const to = p.tiles + 1 + tiles + tile;
    if (place == 0) *to = make_int4(expert, unit * kManyRowsUnit, rows, unit);
    run = max(run, last_begin);
    tiles += more;
#pragma unroll
    for (int i = 1; i < kManyRowsUnits; ++i) {
      __syncthreads();
      if (place == i) to[-1].z = i * kManyRowsUnit + rows;
    }
    if (thread == 0) {
      memory.rows[0] = memory.rows[kWidenThreads];
      memory.experts[0] = memory.experts[kWidenThreads];
    }
    __syncthreads();
  }
  return tiles;
}

__device__ __forceinline__ void list_tiles(const ManyRowsPlan& p, ListMemory& memory) {
  const int32_t tiles = p.masked ? list_slabs(p, memory) : list_segments(p, memory);
  if (threadIdx.x == 0) *p.tiles = make_int4(tiles, 0, 0, 0);
}

}  // namespace many_rows
}  // namespace dgmoe
