// The CUDA side of what the gates share: a warp a token. Reductions give every lane the same bits.
#pragma once

#include "../common/cuda.cuh"
#include "gate.h"

namespace dgmoe {

constexpr unsigned kWholeWarp = 0xffffffffu;

template <typename T>
struct Logit;
template <>
struct Logit<float> {
  __device__ static float widen(float x) { return x; }
};
struct Bf16Bits {
  uint16_t bits;
};
template <>
struct Logit<Bf16Bits> {
  __device__ static float widen(Bf16Bits x) { return bf16_to_float(x.bits); }
};
struct HalfBits {
  uint16_t bits;
};
template <>
struct Logit<HalfBits> {
  __device__ static float widen(HalfBits x) { return half_to_float(x.bits); }
};

// A row of logits of a dtype that the compiler knows: loads of several columns then overlap.
template <typename T>
struct LogitRow {
  const T* data;
  int64_t stride;

  __device__ LogitRow(const GatePlan& plan, int64_t token)
      : data(static_cast<const T*>(plan.logits.data) + token * plan.logits.row_stride),
        stride(plan.logits.column_stride) {}
  __device__ float operator[](int64_t expert) const {
    return Logit<T>::widen(data[expert * stride]);
  }
};

// The same in shared memory, as fp32.
struct SharedRow {
  const float* data;
  __device__ float operator[](int64_t expert) const { return data[expert]; }
};

__device__ __forceinline__ uint32_t warp_max(uint32_t x) {
  return __reduce_max_sync(kWholeWarp, x);
}
__device__ __forceinline__ uint32_t warp_min(uint32_t x) {
  return __reduce_min_sync(kWholeWarp, x);
}

// The sum of 32 lanes, folded in halves: addition commutes, so that all lanes have lane 0's bits.
__device__ __forceinline__ float fold_lanes(float x) {
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) x += __shfl_xor_sync(kWholeWarp, x, half);
  return x;
}

// 1 / x for 1 <= x < 2^126, rounded to nearest, without the branch that other operands need: the
// same steps that the compiler takes for these.
__device__ __forceinline__ float normal_reciprocal(float x) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
  return fused_multiply_add(guess, -fused_multiply_add(guess, x, -1.0f), guess);
}

// By one whole warp.
template <typename T>
__device__ RowStats softmax_stats(const LogitRow<T>& row, int64_t experts, int lane) {
  uint32_t most = 0;
#pragma unroll 4
  for (int64_t e = lane; e < experts; e += kLanes) {
    const uint32_t key = ordered_key(row[e]);
    most = key > most ? key : most;
  }
  RowStats stats;
  stats.max = key_value(warp_max(most));
  float sum = 0.0f;
  for (int64_t e = lane; e < experts; e += kLanes) sum += exp_f32(row[e] - stats.max);
  stats.sum = fold_lanes(sum);
  return stats;
}

__device__ __forceinline__ void pad_row(const GatePlan& plan, int64_t token, int lane) {
  const int64_t width = plan.width();
#pragma unroll 1  // here and below: mostly one iteration; unrolled code costs fetches
  for (int64_t j = lane; j < width; j += kLanes) {
    plan.weights[token * width + j] = 0.0f;
    plan.ids[token * width + j] = -1;
  }
}

// Turns the chosen experts into weights and physical ids, by one whole warp: lane j % 32 calls
// chosen(j) twice, both times before it writes slot j. A negative one has weight 0.
template <typename Row, typename Chosen, typename Score>
__device__ void finish_scored(const GatePlan& plan, int64_t token, const Row& row, int lane,
                              const Chosen& chosen, const Score& score_in) {
  const int64_t width = plan.width();
  float* weights = plan.weights + token * width;
  int32_t* ids = plan.ids + token * width;
  float score = 0.0f;  // of the slot lane, or of this lane's only slot
  float sum = 0.0f;
#pragma unroll 1
  for (int64_t j = lane; j < plan.top_k; j += kLanes) {
    const int32_t expert = chosen(j);
    score = expert < 0 ? 0.0f : score_in(row[expert]);
    if (plan.top_k > kLanes) weights[j] = score;
    sum += score;
  }
  sum = fold_lanes(sum);
#pragma unroll 1
  for (int64_t j = lane; j < width; j += kLanes) {
    const bool routed = j < plan.top_k;
    const int64_t expert = routed ? chosen(j) : plan.experts + j - plan.top_k;
    if (routed && plan.top_k > kLanes) score = weights[j];
    const float weight = expert < 0 ? 0.0f
                         : routed   ? final_weight(plan, score, sum)
                                    : plan.shared_weight;
    const int32_t id = expert < 0 ? -1 : physical_expert(plan, token, expert);
    weights[j] = weight;
    ids[j] = id;
    if (id >= 0 && id < plan.num_counts) atomicAdd(plan.counts + id, 1);  // integers: any order
  }
}

template <typename Row, typename Chosen>
__device__ void finish_row(const GatePlan& plan, int64_t token, const Row& row,
                           const RowStats& stats, int lane, const Chosen& chosen) {
  finish_scored(plan, token, row, lane, chosen,
                [&](float logit) { return score_of(plan.scoring, logit, stats); });
}

template <Scoring kScoring, typename Row, typename Chosen>
__device__ void finish_row(const GatePlan& plan, int64_t token, const Row& row,
                           const RowStats& stats, int lane, const Chosen& chosen) {
  finish_scored(plan, token, row, lane, chosen,
                [&](float logit) { return score_of(kScoring, logit, stats); });
}

inline void clear_counts(const CudaScope& scope, const GatePlan& plan) {
  if (plan.num_counts == 0) return;
  STD_CUDA_CHECK(
      cudaMemsetAsync(plan.counts, 0, plan.num_counts * sizeof(int32_t), scope.stream()));
}

// Calls launch with a value of the type of the logits.
template <typename Launch>
void with_logit_type(const GatePlan& plan, const Launch& launch) {
  switch (plan.logits.kind) {
    case WeightKind::kFloat:
      return launch(float{});
    case WeightKind::kBf16:
      return launch(Bf16Bits{});
    default:
      return launch(HalfBits{});
  }
}

}  // namespace dgmoe
