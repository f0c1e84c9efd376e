// The epilogue of the kernels of 2-CTA clusters: accumulators to bf16, transposed through shared
// memory and stored in rows of d.
#pragma once

#include "pipeline.cuh"

namespace dgmoe {
namespace sm90 {

constexpr int kEpiloguePitch =
    64 * 2 + 16;  // bytes of a row in shared memory, padded against conflicts
constexpr int kEpilogueBytes = kMathWarpgroups * 64 * kEpiloguePitch;

// Stores the tile of a warpgroup: 64 rows of the weight, kRows rows of a, of which tile.rows are
// valid. accum[4t ..] are of rows r and r + 8 of the warp's 16 of the weight and of rows 2c and 2c
// + 1 of the t-th eight of a, for lane 4r + c.
template <int kRows>
__device__ __forceinline__ void store_tile(const MxClusterPlan& p, const WorkTile& tile,
                                           int warpgroup, uint32_t memory,
                                           const float (&accum)[kRows / 2], float scale) {
  uint16_t* const to = p.d + tile.row * p.n;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const uint32_t staging = memory + warpgroup * 64 * kEpiloguePitch;
  // Matrices of stmatrix: 8 rows of the weight on, 8 rows of a on, both.
  const uint32_t at =
      staging + (lane / 16 * 8 + lane % 8) * kEpiloguePitch + (warp * 16 + lane / 8 % 2 * 8) * 2;
  const int32_t column = tile.first_n + warpgroup * 64 + thread % 8 * 8;
#pragma unroll
  for (int base = 0; base < kRows; base += 64) {
    const int here = kRows - base < 64 ? kRows - base : 64;
    warpgroup_sync(warpgroup);  // the rows before have been read
#pragma unroll
    for (int j = 0; j < here / 8; j += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float x = accum[(base / 8 + j) * 4 + q * 2] * scale;
        const float y = accum[(base / 8 + j) * 4 + q * 2 + 1] * scale;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed[q]) : "f"(y), "f"(x));
      }
      stmatrix_x4_trans(at + j * 8 * kEpiloguePitch, packed);
    }
    warpgroup_sync(warpgroup);
#pragma unroll
    for (int j = 0; j < here / 16; ++j) {
      const int32_t row = thread / 8 + j * 16;
      uint32_t chunk[4];
      ld_shared_v4_b32(chunk, staging + row * kEpiloguePitch + thread % 8 * 16);
      if (base + row < tile.rows && column < p.n) {
        *reinterpret_cast<uint4*>(to + int64_t{base + row} * p.n + column) =
            make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
      }
    }
  }
}

}  // namespace sm90
}  // namespace dgmoe
