#include "moe_dispatch_index.h"

#include "../common/scan.cuh"
#include "rank_rows.cuh"

namespace dgmoe {
namespace {

constexpr int64_t kTileExperts = 128;
constexpr int64_t kWordTokens = 32;
constexpr int64_t kMostWords = 32;
constexpr int64_t kFewestWords = 8;
constexpr int64_t kChunks = 64;  // target: a CTA sums the counts of all chunks before its own
constexpr int64_t kMostThreads = 1024;
constexpr int64_t kSharedBytes = 40960;

// Tokens are cut into chunks of `words` * 32 and experts into tiles; a block ranks one chunk in one
// tile.
struct RankPlan {
  DispatchIndexPlan index;
  Segments segments;
  int32_t* chunk_counts;  // [chunks, experts]; with one chunk unused
  int64_t chunks, tiles, tile, words;
};

// kWhole ranks a single chunk; with more, kCount first finds the rows of each chunk and kPlace adds
// up those before.
enum class RankPhase { kWhole, kCount, kPlace };

// offsets = exclusive sum of the padded counts. The whole block, of full warps, calls it.
__device__ void sum_segments(const int32_t* counts, int64_t experts, const Segments& segments) {
  __shared__ int32_t warp_sums[kMostThreads / 32];
  int32_t running = 0;
  for (int64_t first = 0; first < experts; first += blockDim.x) {
    const int64_t e = first + threadIdx.x;
    const int32_t padded =
        e < experts ? static_cast<int32_t>(round_up(counts[e], segments.alignment)) : 0;
    int32_t total;
    const int32_t before =
        block_exclusive_sum(padded, warp_sums, static_cast<int>(blockDim.x / 32), total);
    if (e < experts) segments.offsets[e] = running + before;
    running += total;
    __syncthreads();  // before the next round overwrites warp_sums
  }
}

__global__ void segment_offsets_kernel(RankPlan plan) {
  const int64_t experts = plan.index.num_local_experts;
  for (int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
    int32_t rows = 0;
#pragma unroll 8
    for (int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
      rows += __ldg(plan.chunk_counts + chunk * experts + e);
    }
    plan.index.masked_m[e] = rows;
  }
  __syncthreads();
  sum_segments(plan.index.masked_m, experts, plan.segments);
}

// A bit a (token, expert) makes the rank a popcount: the order in which threads set bits does not
// matter, and a token that names an expert twice counts once.
template <RankPhase kPhase>
__global__ void __launch_bounds__(kMostThreads) rank_rows_kernel(RankPlan plan) {
  extern __shared__ uint32_t bitmap[];  // [words, tile]
  const DispatchIndexPlan& index = plan.index;
  const int64_t all_experts = index.num_local_experts;
  const int tile = static_cast<int>(plan.tile);
  const int words = static_cast<int>(plan.words);
  int32_t* ranks =
      reinterpret_cast<int32_t*>(bitmap) + words * tile;  // [words, tile]: before the word's tokens

  const int64_t chunk = blockIdx.x / plan.tiles;
  const int64_t first_expert = (blockIdx.x - chunk * plan.tiles) * plan.tile;
  const int64_t experts = all_experts - first_expert < tile ? all_experts - first_expert : tile;
  const int64_t first_token = chunk * words * kWordTokens;
  const int64_t left = index.tokens - first_token;
  const int64_t tokens = left < words * kWordTokens ? left : words * kWordTokens;
  const int64_t entries = tokens * index.top_k;

  for (int i = threadIdx.x; i < words * tile; i += blockDim.x) bitmap[i] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < entries; i += blockDim.x) {
    const int64_t token = i / index.top_k;
    const int64_t e = index.ids.local_expert(first_token + token, i - token * index.top_k,
                                             index.expert_start, all_experts) -
                      first_expert;
    if (e >= 0 && e < experts) {
      atomicOr(&bitmap[token / kWordTokens * tile + e], 1u << (token % kWordTokens));
    }
  }
  __syncthreads();

  for (int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
    int32_t rank = 0;
    if (kPhase == RankPhase::kPlace) {
#pragma unroll 8
      for (int64_t before = 0; before < chunk; ++before) {
        rank += __ldg(plan.chunk_counts + before * all_experts + first_expert + e);
      }
    }
    for (int word = 0; word < words; ++word) {
      ranks[word * tile + e] = rank;
      rank += __popc(bitmap[word * tile + e]);
    }
    if (kPhase == RankPhase::kCount) {
      plan.chunk_counts[chunk * all_experts + first_expert + e] = rank;
    } else if (chunk == plan.chunks - 1) {
      index.masked_m[first_expert + e] = rank;
    }
  }
  if (kPhase == RankPhase::kCount) return;
  __syncthreads();
  const bool segmented = plan.segments.offsets != nullptr;
  if (kPhase == RankPhase::kWhole && segmented) {
    sum_segments(index.masked_m, all_experts, plan.segments);  // one tile holds all experts
    __syncthreads();
  }

  for (int64_t i = threadIdx.x; i < entries; i += blockDim.x) {
    const int64_t token = i / index.top_k;
    const int64_t expert = index.ids.local_expert(first_token + token, i - token * index.top_k,
                                                  index.expert_start, all_experts);
    int32_t* out = index.src2dst + first_token * index.top_k + i;
    const int64_t e = expert - first_expert;
    if (expert < 0) {
      if (first_expert == 0) *out = -1;
    } else if (e >= 0 && e < experts) {
      const int64_t word = token / kWordTokens * tile + e;
      const uint32_t earlier = bitmap[word] & ((1u << (token % kWordTokens)) - 1u);
      const int64_t start = segmented ? plan.segments.offsets[expert] : expert * index.m_max;
      *out = static_cast<int32_t>(start + ranks[word] + __popc(earlier));
    }
  }
}

std::tuple<Tensor, Tensor> moe_dispatch_index_cuda(const Tensor& topk_ids,
                                                   int64_t num_local_experts, int64_t m_max,
                                                   int64_t expert_start) {
  const CudaScope scope(topk_ids);
  MoeDispatchIndexCall call =
      plan_moe_dispatch_index(topk_ids, num_local_experts, m_max, expert_start);
  rank_rows("moe_dispatch_index", scope, call.plan, topk_ids);
  return {call.masked_m, call.src2dst};
}

int64_t clamp(int64_t value, int64_t least, int64_t most) {
  return value < least ? least : value > most ? most : value;
}

}  // namespace

void rank_rows(const char* op, const CudaScope& scope, const DispatchIndexPlan& index,
               const Tensor& like, Segments segments) {
  const int64_t experts = index.num_local_experts;
  if (experts == 0 && index.tokens * index.top_k == 0) return;
  const bool segmented = segments.offsets != nullptr;
  const int64_t all_words = clamp(ceil_div(index.tokens, kWordTokens), 1, INT32_MAX);
  // Segments need every expert's count at once: a single block where its shared memory suffices.
  const bool whole =
      all_words <= kMostWords && (!segmented || experts <= kSharedBytes / 8 / all_words);
  const int64_t aimed = clamp(ceil_div(all_words, kChunks), kFewestWords, kMostWords);
  const int64_t words = whole || all_words < aimed ? all_words : aimed;
  const int64_t tile = whole && segmented ? experts : clamp(experts, 0, kTileExperts);
  const int64_t chunks = ceil_div(all_words, words);
  const int64_t tiles = tile == 0 ? 1 : ceil_div(experts, tile);
  // Goes back to the caching allocator at return; its next user waits in the same stream.
  Tensor counts = empty(op, "counts", {whole ? 0 : chunks, experts}, ScalarType::Int, like);
  const RankPlan plan{
      index, segments, static_cast<int32_t*>(mutable_data_of(counts)), chunks, tiles, tile, words};
  const int64_t chunk_tokens = clamp(index.tokens, 0, words * kWordTokens);
  const int64_t work = chunk_tokens * index.top_k > tile ? chunk_tokens * index.top_k : tile;
  const unsigned threads = static_cast<unsigned>(round_up(clamp(work, 1, kMostThreads), 32));
  const unsigned grid = static_cast<unsigned>(chunks * tiles);
  const unsigned shared = static_cast<unsigned>(words * tile * 8);
  if (whole) {
    DGMOE_LAUNCH(rank_rows_kernel<RankPhase::kWhole>, grid, threads, shared, scope, plan);
    return;
  }
  DGMOE_LAUNCH(rank_rows_kernel<RankPhase::kCount>, grid, threads, shared, scope, plan);
  if (segmented) DGMOE_LAUNCH(segment_offsets_kernel, 1u, kMostThreads, 0, scope, plan);
  DGMOE_LAUNCH(rank_rows_kernel<RankPhase::kPlace>, grid, threads, shared, scope, plan);
}

}  // namespace dgmoe

STABLE_TORCH_LIBRARY_IMPL(dgmoe, CUDA, m) {
  m.impl("moe_dispatch_index", DGMOE_BOX(dgmoe::moe_dispatch_index_cuda));
}
