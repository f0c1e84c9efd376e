// A token a warp: the kernel of topk_gate for up to kWarpExperts experts, all in registers.
#pragma once

#include "gate.cuh"
#include "topk_gate.h"

namespace dgmoe {

constexpr int kWarpThreads = 128;  // four tokens a block
constexpr int kWarps = kWarpThreads / kLanes;
constexpr int64_t kWarpExperts = 512;  // more do not fit a warp's registers

// The key of one group by a whole warp; member(e) is the key of expert e.
template <typename Member>
__device__ uint32_t group_key(const TopkGatePlan& plan, int64_t group, int lane,
                              const Member& member) {
  uint32_t first = 0;
  uint32_t second = 0;
#pragma unroll 1
  for (int64_t i = lane; i < plan.group_size; i += kLanes) {
    const uint32_t key = member(group * plan.group_size + i);
    const uint32_t lower = key < first ? key : first;
    second = lower > second ? lower : second;
    first = key > first ? key : first;
  }
  const uint32_t best = warp_max(first);
  if (!plan.top_two) return best;
  // Only the first lane that holds the best removes it; others with an equal key keep theirs.
  const int owner = __ffs(__ballot_sync(kWholeWarp, first == best)) - 1;
  return plan.group_key(best, warp_max(lane == owner ? second : first));
}

// What a warp keeps in shared memory: logits, keys of experts and of groups.
struct WarpRoom {
  float* logits;      // [experts]
  uint32_t* members;  // [experts], where groups limit the choice
  uint32_t* groups;   // [num_groups], likewise
};

__host__ __device__ inline int64_t room_words(const TopkGatePlan& plan) {
  const bool grouped = plan.topk_groups < plan.num_groups;
  return plan.gate.experts + (grouped ? plan.gate.experts + plan.num_groups : 0);
}

// Loads of all slots are in flight together, whatever the dtype.
template <int kSlots>
__device__ __forceinline__ void load_logits(const GatePlan& gate, int64_t token, int lane,
                                            float (&x)[kSlots]) {
  const int experts = static_cast<int>(gate.experts);
  const auto load = [&](auto type) {
    const LogitRow<decltype(type)> row(gate, token);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int e = i * kLanes + lane;
      x[i] = e < experts ? row[e] : 0.0f;
    }
  };
  if (gate.logits.kind == WeightKind::kFloat) {
    load(float{});
  } else if (gate.logits.kind == WeightKind::kBf16) {
    load(Bf16Bits{});
  } else {
    load(HalfBits{});
  }
}

// Best and second best of two disjoint sets.
struct BestTwo {
  uint32_t first = 0;
  uint32_t second = 0;

  __device__ __forceinline__ void add(uint32_t other_first, uint32_t other_second) {
    const uint32_t lower = other_first < first ? other_first : first;
    first = other_first > first ? other_first : first;
    second = other_second > second ? other_second : second;
    second = lower > second ? lower : second;
  }
};

// The keys of all groups, a part of the warp each where they share it evenly.
__device__ __forceinline__ void find_group_keys(const TopkGatePlan& plan, int lane,
                                                const WarpRoom& room) {
  const int num_groups = static_cast<int>(plan.num_groups);
  const int group_size = static_cast<int>(plan.group_size);
  if (num_groups > kLanes || (num_groups & (num_groups - 1)) != 0) {
#pragma unroll 1
    for (int g = 0; g < num_groups; ++g) {
      const uint32_t best = group_key(plan, g, lane, [&](int64_t e) { return room.members[e]; });
      if (lane == 0) room.groups[g] = best;
    }
    return;
  }
  const int shift = __ffs(kLanes) - __ffs(num_groups);  // divisions would take longer than the rest
  const int share = 1 << shift;                         // lanes a group
  const int g = lane >> shift;
  // Groups begin at different columns: groups of 32 experts would all conflict on the same banks.
  const int skew = group_size >= kLanes ? g * share : 0;
  BestTwo best;
#pragma unroll 4
  for (int i = lane & (share - 1); i < group_size; i += share) {
    const int column = i + skew < group_size ? i + skew : i + skew - group_size;
    best.add(room.members[g * group_size + column], 0);
  }
  for (int step = 1; step < share; step *= 2) {
    best.add(__shfl_xor_sync(kWholeWarp, best.first, step),
             __shfl_xor_sync(kWholeWarp, best.second, step));
  }
  if ((lane & (share - 1)) == 0) room.groups[g] = plan.group_key(best.first, best.second);
}

constexpr int kQuotientShift = 20;  // enough for quotients of numbers below 512

// Takes the experts of dropped groups out of the choice; an expert times `reciprocal`, shifted, is
// its group.
template <int kSlots>
__device__ __forceinline__ void drop_groups(const TopkGatePlan& plan, int reciprocal, int lane,
                                            const WarpRoom& room, uint32_t (&key)[kSlots]) {
  const int experts = static_cast<int>(plan.gate.experts);
  const int num_groups = static_cast<int>(plan.num_groups);
  __syncwarp();
  find_group_keys(plan, lane, room);
  __syncwarp();
  // A group stays that fewer than topk_groups others outrank.
  for (int g = lane; g < num_groups; g += kLanes) {
    const uint64_t rank = ranked(room.groups[g], g);
    int above = 0;
#pragma unroll 4
    for (int other = 0; other < num_groups; ++other) {
      above += ranked(room.groups[other], other) > rank;
    }
    room.members[g] = above < plan.topk_groups;  // as many as experts, or fewer
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int e = i * kLanes + lane;
    if (e < experts && room.members[(e * reciprocal) >> kQuotientShift] == 0) key[i] = 0;
  }
}

// score_of for all slots of a lane. A division brings a branch for rare operands, behind which the
// next slot's waits; sigmoid's are known to be 1 or more, so that one branch serves all slots.
template <Scoring kScoring, int kSlots>
__device__ __forceinline__ void score_slots(const float (&x)[kSlots], const RowStats& stats,
                                            float (&score)[kSlots]) {
  if constexpr (kScoring == Scoring::kSigmoid) {
    float divisor[kSlots];
    bool rare = false;  // the quotient might be subnormal, zero or NaN
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      divisor[i] = 1.0f + exp_f32(-x[i]);
      rare |= !(divisor[i] < 0x1p126f);
      score[i] = normal_reciprocal(divisor[i]);
    }
    if (rare) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) score[i] = 1.0f / divisor[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) score[i] = score_of(kScoring, x[i], stats);
  }
}

// The slot of the highest key of a lane, the lowest of equal ones; pairs first, so that the chain
// is short.
template <int kSlots>
__device__ __forceinline__ void best_slot(const uint32_t (&key)[kSlots], uint32_t& best,
                                          int& slot) {
  uint32_t keys[kSlots];
  int slots[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    keys[i] = key[i];
    slots[i] = i;
  }
#pragma unroll
  for (int step = 1; step < kSlots; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kSlots; i += 2 * step) {
      slots[i] = keys[i + step] > keys[i] ? slots[i + step] : slots[i];
      keys[i] = keys[i + step] > keys[i] ? keys[i + step] : keys[i];
    }
  }
  best = keys[0];
  slot = slots[0];
}

// A token a warp, its keys in registers: lane l holds experts l, l + 32, ... The scoring is a
// template argument: code that a launch does not need would cost more than its arithmetic.
template <int kSlots, Scoring kScoring>
__global__ void __launch_bounds__(kWarpThreads)
    topk_gate_warp_kernel(TopkGatePlan plan, int group_reciprocal) {
  extern __shared__ uint32_t rooms[];
  const GatePlan& gate = plan.gate;
  const int experts = static_cast<int>(gate.experts);
  const int lane = threadIdx.x % kLanes;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (token >= gate.tokens) return;
  const bool grouped = plan.topk_groups < plan.num_groups;
  uint32_t* mine = rooms + threadIdx.x / kLanes * room_words(plan);
  const WarpRoom room{reinterpret_cast<float*>(mine), mine + experts, mine + 2 * experts};
  float x[kSlots];
  float bias[kSlots];
  load_logits(gate, token, lane, x);
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int e = i * kLanes + lane;
    bias[i] = plan.bias != nullptr && e < experts ? plan.bias[e * plan.bias_stride] : 0.0f;
  }
  if (token >= real_tokens(gate)) {  // loaded after the logits, so that both loads overlap
    pad_row(gate, token, lane);
    return;
  }
  uint32_t key[kSlots];  // 0: taken, or no such expert
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int e = i * kLanes + lane;
    if (e < experts) room.logits[e] = x[i];
    key[i] = e < experts ? ordered_key(x[i]) : 0;
    most = key[i] > most ? key[i] : most;
  }
  RowStats stats;
  if constexpr (kScoring == Scoring::kSoftmax) {
    stats.max = key_value(warp_max(most));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (i * kLanes + lane < experts) sum += exp_f32(x[i] - stats.max);
    }
    stats.sum = fold_lanes(sum);
  }
  const bool biased = plan.bias != nullptr;
  const bool sums_scores = grouped && plan.top_two;
  if (biased || sums_scores) {
    float score[kSlots];
    score_slots<kScoring>(x, stats, score);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int e = i * kLanes + lane;
      const uint32_t scored = ordered_key(biased ? score[i] + bias[i] : score[i]);
      if (e < experts && grouped) room.members[e] = scored;
      if (e < experts && biased) key[i] = scored;
    }
  } else if (grouped) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (i * kLanes + lane < experts) room.members[i * kLanes + lane] = key[i];
    }
  }
  if (grouped) {
    drop_groups(plan, group_reciprocal, lane, room, key);
  }
  uint32_t chosen = 0;  // the expert of slot `lane`
  for (int j = 0; j < gate.top_k; ++j) {
    uint32_t best;
    int slot;
    best_slot(key, best, slot);
    const uint32_t at = static_cast<uint32_t>(slot * kLanes + lane);
    const uint32_t expert = warp_min(best == warp_max(best) ? at : 0xffffffffu);
    chosen = lane == j ? expert : chosen;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      key[i] = expert == static_cast<uint32_t>(i * kLanes + lane) ? 0 : key[i];
    }
  }
  __syncwarp();
  finish_row<kScoring>(gate, token, SharedRow{room.logits}, stats, lane,
                       [&](int64_t) { return static_cast<int32_t>(chosen); });
}

}  // namespace dgmoe
