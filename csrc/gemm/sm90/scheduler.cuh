// The persistent tile scheduler of the kernels that work in 2-CTA clusters, sm90_mx_medium_m and
// sm90_mx_large_m.
//
// Rows of a are cut into M blocks of 128, within an expert. A cluster tile has 256 rows of the
// weight and up to kBlocksM M blocks of one expert. A kernel before (prepare.cuh) lists these, and
// the CTAs of a cluster take half of the weight's rows each.
#pragma once

#include "mx_common.cuh"

namespace dgmoe {

struct MxClusterPlan : MxPlan {
  uint8_t* rows;  // of a, prepared: M blocks, and in them K blocks
  // sm90_mx_large_m only: kSlicesPerBlockM of an M block, whether it has a value that bf16 cannot
  // hold.
  int32_t* flags;
  int4* tiles;  // x of the first: how many follow; then expert, row of a, rows and M block of each
};

constexpr int kMathWarpgroups = 2;          // each takes 64 rows of the weight
constexpr int kWeightProducerThreads = 64;  // of the producer warpgroup
constexpr int kCtaThreads = 128 * (kMathWarpgroups + 1);
constexpr int kBlockN = 64 * kMathWarpgroups;  // rows of the weight of a CTA
constexpr int kClusterN = 256;                 // and of a cluster
constexpr int kBlockM = 128;                   // rows of a of an M block
constexpr int kSlicesPerBlockM = 4;            // each prepared by one CTA
constexpr int kSliceM = 32;                    // rows of a slice; loads of a are whole slices
constexpr int kPrepareThreads = 128;
static_assert(kClusterN == 2 * kBlockN);
static_assert(kSliceM == kBlockM / kSlicesPerBlockM);

namespace sm90 {

struct WorkTile {
  int32_t index;            // past the last tile: no work
  int32_t expert, first_n;  // first_n is the CTA's
  int32_t m_block, rows;
  int64_t row, scale_row;  // of a; within the expert's slab for scales of masked calls
};

template <int kBlocksM>  // of a tile, at most
struct TileScheduler {
  const MxClusterPlan& p;
  int32_t row_tiles, n_blocks;
  int cta;  // rank in the cluster, whose CTAs share its tiles

  // Row tiles that run through all N blocks together, so that their rows of a stay in L2.
  static constexpr int kGroupM = 1024 / (kBlocksM * kBlockM);

  __device__ __forceinline__ explicit TileScheduler(const MxClusterPlan& plan)
      : p(plan),
        row_tiles(plan.tiles->x),
        n_blocks((plan.n + kClusterN - 1) / kClusterN),
        cta(block_rank_in_cluster()) {}
  __device__ __forceinline__ bool is_valid(const WorkTile& tile) const {
    return tile.index < row_tiles * n_blocks;
  }
  __device__ __forceinline__ WorkTile initial_work() const { return work(blockIdx.x / 2); }
  __device__ __forceinline__ WorkTile next_work(const WorkTile& tile) const {
    return work(tile.index + gridDim.x / 2);
  }
  __device__ __forceinline__ WorkTile work(int32_t index) const {
    WorkTile tile{};
    tile.index = index;
    if (!is_valid(tile)) return tile;
    const int32_t group = index / (kGroupM * n_blocks);
    const int32_t width = min(kGroupM, row_tiles - group * kGroupM);
    const int32_t local = index - group * kGroupM * n_blocks;
    const int32_t n_block = local / width;
    const int4 found = __ldg(p.tiles + 1 + group * kGroupM + local - n_block * width);
    tile.first_n = n_block * kClusterN + cta * kBlockN;
    tile.expert = found.x;
    tile.scale_row = found.y;
    tile.row = (p.masked ? found.x * p.m : 0) + found.y;
    tile.rows = found.z;
    tile.m_block = found.w;
    return tile;
  }
};

}  // namespace sm90
}  // namespace dgmoe
