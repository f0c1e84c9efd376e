// The warp-specialised pipeline of the kernels of 2-CTA clusters: warp roles, stages and their
// barriers, and the producers.
//
//   warpgroups 0, 1   math: wait for `full`, multiply, arrive at `empty` of both CTAs
//   warpgroup 2       threads 0 to 63 load the CTA's rows of the weight (cp.async); thread 64 loads
//                     half of a's rows into both CTAs (bulk copies, multicast); the others idle
//
// A stage's `full` mbarrier counts the weight's producer threads and a's bytes, from both CTAs. Its
// `empty` mbarrier counts a warp of either CTA that has read a. That the weights have been read is
// a named barrier instead, since they are the CTA's own: every math thread arrives, and none needs
// to wait for the rest of its warp.
#pragma once

#include "scheduler.cuh"

namespace dgmoe {
namespace sm90 {

// Named barriers: one a math warpgroup from 1 on, then one a stage for its weights.
constexpr int kFirstWeightsReadBarrier = 3;
constexpr int kWeightsReadThreads = 128 * kMathWarpgroups + kWeightProducerThreads;

__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
  named_barrier_sync<128>(warpgroup + 1);
}
__device__ __forceinline__ bool warpgroup_any(int warpgroup, bool pred) {
  return named_barrier_sync_or<128>(warpgroup + 1, pred);
}
__device__ __forceinline__ void arrive_weights_read(int stage) {
  named_barrier_arrive<kWeightsReadThreads>(kFirstWeightsReadBarrier + stage);
}
__device__ __forceinline__ void wait_weights_read(int stage) {
  named_barrier_sync<kWeightsReadThreads>(kFirstWeightsReadBarrier + stage);
}

// A math warp's pipeline state, from tile to tile.
template <typename Config>
struct ConsumerState {
  int stage = 0;
  uint32_t phase = 0;
  uint32_t full, empty;  // mbarriers of the first stage; empty is of the CTA of the lane's parity

  __device__ __forceinline__ explicit ConsumerState(uint32_t memory)
      : full(no_rematerialize(memory + Config::kFull)),
        empty(no_rematerialize(map_smem_to_cta(memory + Config::kEmpty, threadIdx.x % 2))) {}
  __device__ __forceinline__ void wait_full() const { mbarrier_wait(full + stage * 8, phase); }
  __device__ __forceinline__ void advance() {
    if (++stage == Config::kStages) stage = 0, phase ^= 1;
  }
  // Releases a stage's a to the producers of both CTAs, since both write there.
  __device__ __forceinline__ void release(int of) const {
    if (threadIdx.x % 32 < 2) mbarrier_arrive_cluster(empty + of * 8);
  }
};

// The producer threads of the weight, and of its scales where the stages hold those.
template <typename Config, int kBlocksM>
__device__ __forceinline__ void load_weights(const TileScheduler<kBlocksM>& scheduler,
                                             uint32_t memory, int thread) {
  const MxClusterPlan& p = scheduler.p;
  constexpr int kChunks = Config::kRowBytes / 16;
  constexpr int kAtOnce = kWeightProducerThreads / kChunks;
  const int32_t row_bytes = p.k / Config::kBlockK * Config::kRowBytes;
  const int32_t k_blocks = p.k / Config::kBlockK;
  int stage = 0;
  bool filled = false;  // all stages, once
  for (WorkTile tile = scheduler.initial_work(); scheduler.is_valid(tile);
       tile = scheduler.next_work(tile)) {
    const uint8_t* weights = p.b + int64_t{tile.expert} * p.n * row_bytes + thread % kChunks * 16;
    const int32_t first = tile.first_n + thread / kChunks;
    const int32_t* scales = p.b_scale + tile.expert * p.b_scale_batch;
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
      if (filled) wait_weights_read(stage);
      const uint32_t to = memory + stage * Config::kStageBytes + Config::kWeights +
                          Config::weight_offset(thread / kChunks, thread % kChunks);
#pragma unroll
      for (int i = 0; i < kBlockN / kAtOnce; ++i) {
        const uint32_t row = min(first + i * kAtOnce, p.n - 1);
        cp_async_16(to + i * kWeightProducerThreads * 16, weights + row * row_bytes);
      }
      if constexpr (Config::kScaleBytes != 0) {
#pragma unroll
        for (int i = 0; i < kBlockN / kWeightProducerThreads; ++i) {
          const int32_t row = thread + i * kWeightProducerThreads;
          cp_async_4(memory + Config::kScales + stage * Config::kScaleBytes + row * 4,
                     scales + min(tile.first_n + row, p.n - 1) * p.b_scale_row);
        }
        scales += p.b_scale_word;
      }
      cp_async_mbarrier_arrive_noinc(memory + Config::kFull + stage * 8);
      weights += Config::kRowBytes;
      if (++stage == Config::kStages) stage = 0, filled = true;
    }
  }
  // The tail: every arrival at a named barrier needs its wait.
  for (int i = filled ? stage : 0, left = filled ? Config::kStages : stage; left > 0; --left) {
    wait_weights_read(i);
    if (++i == Config::kStages) i = 0;
  }
}

// The producer thread of a. `copy` issues the bulk copies of a stage: it is given the tile, the K
// block, the stage, its `full` mbarrier and how many rows are this CTA's half.
template <typename Config, int kBlocksM, typename Copy>
__device__ __forceinline__ void load_rows(const TileScheduler<kBlocksM>& scheduler, uint32_t memory,
                                          Copy copy) {
  const int32_t k_blocks = scheduler.p.k / Config::kBlockK;
  int stage = 0;
  uint32_t round = 0;
  for (WorkTile tile = scheduler.initial_work(); scheduler.is_valid(tile);
       tile = scheduler.next_work(tile)) {
    const int32_t half = (tile.rows + kSliceM - 1) / kSliceM * (kSliceM / 2);
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
      const uint32_t full = memory + Config::kFull + stage * 8;
      mbarrier_wait(memory + Config::kEmpty + stage * 8, (round & 1) ^ 1);
      copy(tile, k_block, stage, full, half);
      if (++stage == Config::kStages) stage = 0, ++round;
    }
  }
}

// The kernel's body, by warp role. `math` is given its warpgroup, `produce_weights` its thread.
template <typename Config, typename Math, typename ProduceWeights, typename ProduceRows>
__device__ __forceinline__ void run_warp_specialized(uint32_t memory, Math math,
                                                     ProduceWeights produce_weights,
                                                     ProduceRows produce_rows) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      mbarrier_init(memory + Config::kFull + i * 8, kWeightProducerThreads + 1);
      mbarrier_init(memory + Config::kEmpty + i * 8, 2 * 4 * kMathWarpgroups);
    }
    fence_barrier_init();
  }
  static_assert(kFirstWeightsReadBarrier + Config::kStages <= 16, "a CTA has 16 named barriers");
  cluster_sync();
  if (warp < 4 * kMathWarpgroups) {
    warpgroup_reg_alloc<224>();
    math(warp / 4);
  } else {
    warpgroup_reg_dealloc<56>();
    const int thread = threadIdx.x - 128 * kMathWarpgroups;
    if (thread < kWeightProducerThreads) {
      produce_weights(thread);
    } else if (thread == kWeightProducerThreads) {
      produce_rows();
    }
    __syncwarp();
  }
  cluster_sync();  // the other CTA may still arrive at this one's mbarriers and copy into it
}

}  // namespace sm90
}  // namespace dgmoe
