// Of kernels whose blocks work in pairs: who does what, how weights are copied, and how a tile is
// written.
#pragma once

#include "scheduler.cuh"

namespace dgmoe {
namespace mx_cluster {

// Where a group of warps is in the ring of stages, from tile to tile.
template <typename Shape>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  uint32_t full, empty;  // barriers of the first stage

  __device__ __forceinline__ explicit Ring(uint32_t memory)
      : full(kept(memory + Shape::kFull)),
        empty(kept(address_in(memory + Shape::kEmpty, threadIdx.x % 2))) {}
  __device__ __forceinline__ void wait() const { barrier_wait(full + slot * 8, parity); }
  __device__ __forceinline__ void advance() {
    if (++slot == Shape::kStages) slot = 0, parity ^= 1;
  }
  // The rows of a stage, and what goes with them, have been read. Said to both blocks, which copy to
  // both.
  __device__ __forceinline__ void release(int of) const {
    if (threadIdx.x % 32 < 2) barrier_arrive_at(empty + of * 8);
  }
};

// Threads that copy rows of the weight, and with them their scales, where the stages have room for
// those.
template <typename Shape, int kBlocksM>
__device__ __forceinline__ void copy_weights(const Tiles<kBlocksM>& tiles, uint32_t memory,
                                             int thread) {
  const MxClusterPlan& p = tiles.p;
  constexpr int kChunks = Shape::kRowBytes / 16;
  constexpr int kAtOnce = kWeightProducerThreads / kChunks;
  const int32_t row_bytes = p.k / Shape::kColumns * Shape::kRowBytes;
  const int32_t steps = p.k / Shape::kColumns;
  int slot = 0;
  bool again = false;
  for (Tile tile = tiles.begin(); tiles.there(tile); tile = tiles.after(tile)) {
    const uint8_t* weights = p.b + int64_t{tile.expert} * p.n * row_bytes + thread % kChunks * 16;
    const int32_t first = tile.first_weight + thread / kChunks;
    const int32_t* scales = p.b_scale + tile.expert * p.b_scale_batch;
    for (int32_t step = 0; step < steps; ++step) {
      if (again) wait_for_readers(slot);
      const uint32_t to = memory + slot * Shape::kStageBytes + Shape::kWeights +
                          Shape::place(thread / kChunks, thread % kChunks);
#pragma unroll
      for (int i = 0; i < kBlockN / kAtOnce; ++i) {
        const uint32_t row = min(first + i * kAtOnce, p.n - 1);
        copy16_async(to + i * kWeightProducerThreads * 16, weights + row * row_bytes);
      }
      if constexpr (Shape::kScaleBytes != 0) {
#pragma unroll
        for (int i = 0; i < kBlockN / kWeightProducerThreads; ++i) {
          const int32_t row = thread + i * kWeightProducerThreads;
          copy4_async(memory + Shape::kScales + slot * Shape::kScaleBytes + row * 4,
                      scales + min(tile.first_weight + row, p.n - 1) * p.b_scale_row);
        }
        scales += p.b_scale_word;
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

// One thread copies rows of a: a block of the pair copies one half of them to both. `copy` is given
// the tile, the step, the stage's slot and its barrier, and how many rows the half has.
template <typename Shape, int kBlocksM, typename Copy>
__device__ __forceinline__ void copy_rows(const Tiles<kBlocksM>& tiles, uint32_t memory,
                                          Copy copy) {
  const int32_t steps = tiles.p.k / Shape::kColumns;
  int slot = 0;
  uint32_t round = 0;
  for (Tile tile = tiles.begin(); tiles.there(tile); tile = tiles.after(tile)) {
    const int32_t half = (tile.rows + kSliceM - 1) / kSliceM * (kSliceM / 2);
    for (int32_t step = 0; step < steps; ++step) {
      const uint32_t full = memory + Shape::kFull + slot * 8;
      barrier_wait(memory + Shape::kEmpty + slot * 8, (round & 1) ^ 1);
      copy(tile, step, slot, full, half);
      if (++slot == Shape::kStages) slot = 0, ++round;
    }
  }
}

// The second kernel: two groups multiply, each with its number; of a third one some threads copy
// weights, each with its number, and one copies rows of a.
template <typename Shape, typename Multiply, typename CopyWeights, typename CopyRows>
__device__ __forceinline__ void run_block(uint32_t memory, Multiply multiply,
                                          CopyWeights copy_weights, CopyRows copy_rows) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(memory + Shape::kFull + i * 8, kWeightProducerThreads + 1);
      barrier_init(memory + Shape::kEmpty + i * 8, 2 * 4 * kMathWarpgroups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  static_assert(kReaderBarriers + Shape::kStages <= 16, "a block has 16 barriers");
  meet_pair();
  if (warp < 4 * kMathWarpgroups) {
    take_registers<224>();
    multiply(warp / 4);
  } else {
    give_registers<56>();
    const int thread = threadIdx.x - 128 * kMathWarpgroups;
    if (thread < kWeightProducerThreads) {
      copy_weights(thread);
    } else if (thread == kWeightProducerThreads) {
      copy_rows();
    }
    __syncwarp();
  }
  meet_pair();  // until then the other one arrives here, and copies
}

constexpr int kPitch = 64 * 2 + 16;                          // of a row of the result, in bytes
constexpr int kResultBytes = kMathWarpgroups * 64 * kPitch;  // of both groups

// Rounds the sums of a group of warps, of 64 rows of the weight and kRows rows of a, and writes them.
// sums[4t ..] are of rows r and r + 8 of the warp's weights and of rows 2c and 2c + 1 of the t-th
// eight of a.
template <int kRows>
__device__ __forceinline__ void write_tile(const MxClusterPlan& p, const Tile& tile, int group,
                                           uint32_t memory, const float (&sums)[kRows / 2],
                                           float unscale) {
  uint16_t* const to = p.d + tile.row * p.n;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const uint32_t result = memory + group * 64 * kPitch;
  // Lanes 0 to 7 address rows of the first matrix, and so on: 8 weights on, 8 rows on, both.
  const uint32_t at =
      result + (lane / 16 * 8 + lane % 8) * kPitch + (warp * 16 + lane / 8 % 2 * 8) * 2;
  const int32_t column = tile.first_weight + group * 64 + thread % 8 * 8;
#pragma unroll
  for (int base = 0; base < kRows; base += 64) {
    const int here = kRows - base < 64 ? kRows - base : 64;
    meet(group);  // before, others may read here
#pragma unroll
    for (int j = 0; j < here / 8; j += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float x = sums[(base / 8 + j) * 4 + q * 2] * unscale;
        const float y = sums[(base / 8 + j) * 4 + q * 2 + 1] * unscale;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed[q]) : "f"(y), "f"(x));
      }
      store_transposed(at + j * 8 * kPitch, packed);
    }
    meet(group);
#pragma unroll
    for (int j = 0; j < here / 16; ++j) {
      const int32_t row = thread / 8 + j * 16;
      uint32_t chunk[4];
      load_words(chunk, result + row * kPitch + thread % 8 * 16);
      if (base + row < tile.rows && column < p.n) {
        *reinterpret_cast<uint4*>(to + int64_t{base + row} * p.n + column) =
            make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
      }
    }
  }
}

}  // namespace mx_cluster
}  // namespace dgmoe
