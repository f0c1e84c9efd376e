// Of many_rows.cuh: what is copied to shared memory, ahead of those who multiply.
#pragma once

#include "many_rows_work.cuh"

namespace dgmoe {
namespace many_rows {

// One thread copies rows of a; a block of the pair copies one half of them to both.
template <bool kFp4>
__device__ __forceinline__ void copy_rows(const Tiles& tiles, uint32_t memory) {
  using Shape = ManyRowsShape<kFp4>;
  const ManyRowsPlan& p = tiles.p;
  const int32_t steps = p.k / kManyRowsColumns;
  int slot = 0;
  uint32_t round = 0;
  for (Tile tile = tiles.begin(); tiles.there(tile); tile = tiles.after(tile)) {
    const int32_t half =
        (tile.rows + kManyRowsStep - 1) / kManyRowsStep * kManyRowsStep * kManyRowsColumns;
    const int32_t begin = half * tiles.block;
    const uint8_t* from = p.wide + int64_t{tile.unit} * steps * kManyRowsWideBytes;
    for (int32_t step = 0; step < steps; ++step) {
      const uint32_t to = memory + slot * Shape::kStageBytes;
      const uint32_t full = memory + Shape::kFull + slot * 8;
      barrier_wait(memory + Shape::kEmpty + slot * 8, (round & 1) ^ 1);
      barrier_expect(full, half * 2);
#pragma unroll
      for (int unit = 0; unit < kManyRowsUnits; ++unit) {
        const int32_t first = max(begin, unit * kManyRowsWideBytes);
        const int32_t bytes = min(begin + half, (unit + 1) * kManyRowsWideBytes) - first;
        if (bytes > 0) {
          copy_to_pair(to + first, from + int64_t{unit} * (steps - 1) * kManyRowsWideBytes + first,
                       bytes, full);
        }
      }
      from += kManyRowsWideBytes;
      if (++slot == Shape::kStages) slot = 0, ++round;
    }
  }
}

// Threads that copy rows of the weight.
template <bool kFp4>
__device__ __forceinline__ void copy_weights(const Tiles& tiles, uint32_t memory, int thread) {
  using Shape = ManyRowsShape<kFp4>;
  const ManyRowsPlan& p = tiles.p;
  constexpr int kChunks = Shape::kRowBytes / 16;
  constexpr int kAtOnce = kManyRowsCopying / kChunks;
  const int32_t row_bytes = kFp4 ? p.k / 2 : p.k;
  const int32_t steps = p.k / kManyRowsColumns;
  int slot = 0;
  bool again = false;
  for (Tile tile = tiles.begin(); tiles.there(tile); tile = tiles.after(tile)) {
    const uint8_t* weights = p.b + int64_t{tile.expert} * p.n * row_bytes + thread % kChunks * 16;
    const int32_t first = tile.first_weight + thread / kChunks;
    for (int32_t step = 0; step < steps; ++step) {
      if (again) wait_for_readers(slot);
      const uint32_t to = memory + slot * Shape::kStageBytes + Shape::kWeights + thread * 16;
#pragma unroll
      for (int i = 0; i < kManyRowsBlock / kAtOnce; ++i) {
        const uint32_t row = min(first + i * kAtOnce, p.n - 1);
        copy16_async(to + i * kManyRowsCopying * 16, weights + row * row_bytes);
      }
      asm volatile(
          "cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(memory + Shape::kFull + slot * 8)
          : "memory");
      weights += Shape::kRowBytes;
      if (++slot == Shape::kStages) slot = 0, again = true;
    }
  }
  // The readers' last arrivals are met, as all others.
  for (int i = again ? slot : 0, left = again ? Shape::kStages : slot; left > 0; --left) {
    wait_for_readers(i);
    if (++i == Shape::kStages) i = 0;
  }
}

}  // namespace many_rows
}  // namespace dgmoe
