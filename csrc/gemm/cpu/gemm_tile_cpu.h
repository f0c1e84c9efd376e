// The register tile of the CPU kernels: rows of a times rows of b, both fp32, in partial
// sums whose number and order are fixed, so that every instruction set and tile height gives the
// same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "../../common/numerics.h"

namespace dgmoe {

// Partial sums of one output: fixed, so that every instruction set adds alike.
constexpr int64_t kLanes = 16;
constexpr int64_t kTile = 4;    // rows and columns of a register tile
constexpr int64_t kPanel = 16;  // columns of d, rows of b, that one work item computes
constexpr int64_t kStep = 256;  // columns of b dequantised at a time: a panel of them stays in L1

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef float LoadLanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

#define DGMOE_INLINE inline __attribute__((always_inline))

// The constructor form is what GCC turns into one instruction; a loop over the lanes stays scalar.
DGMOE_INLINE void multiply_add(Lanes& c, const Lanes& a, const Lanes& b) {
#define DGMOE_LANE(i) fused_multiply_add(a[i], b[i], c[i])
  c = Lanes{DGMOE_LANE(0),  DGMOE_LANE(1),  DGMOE_LANE(2),  DGMOE_LANE(3),
            DGMOE_LANE(4),  DGMOE_LANE(5),  DGMOE_LANE(6),  DGMOE_LANE(7),
            DGMOE_LANE(8),  DGMOE_LANE(9),  DGMOE_LANE(10), DGMOE_LANE(11),
            DGMOE_LANE(12), DGMOE_LANE(13), DGMOE_LANE(14), DGMOE_LANE(15)};
#undef DGMOE_LANE
}

// Adds `width` columns of Rows rows of a times kTile rows of b to sums[row][column], which stay in
// registers.
template <int Rows>
DGMOE_INLINE void add_tile(const float* a, int64_t a_stride, const float* b, int64_t width,
                           Lanes* sums) {
  Lanes c[Rows][kTile];
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kTile; ++j) c[i][j] = sums[i * kPanel + j];
  }
  for (int64_t x = 0; x < width; x += kLanes) {
    Lanes columns[kTile];
#pragma GCC unroll 4
    for (int j = 0; j < kTile; ++j)
      columns[j] = *reinterpret_cast<const LoadLanes*>(b + j * kStep + x);
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
      const Lanes row = *reinterpret_cast<const LoadLanes*>(a + i * a_stride + x);
#pragma GCC unroll 4
      for (int j = 0; j < kTile; ++j) multiply_add(c[i][j], row, columns[j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kTile; ++j) sums[i * kPanel + j] = c[i][j];
  }
}

DGMOE_INLINE void add_rows(const float* a, int64_t a_stride, const float* b, int64_t width,
                           int64_t rows, Lanes* sums) {
  for (int64_t column = 0; column < kPanel; column += kTile) {
    const float* tile = b + column * kStep;
    switch (rows) {
      case 1:
        add_tile<1>(a, a_stride, tile, width, sums + column);
        break;
      case 2:
        add_tile<2>(a, a_stride, tile, width, sums + column);
        break;
      case 3:
        add_tile<3>(a, a_stride, tile, width, sums + column);
        break;
      default:
        add_tile<4>(a, a_stride, tile, width, sums + column);
        break;
    }
  }
}

DGMOE_INLINE float sum_of(const Lanes& lanes) {
  float partial[kLanes];
  std::memcpy(partial, &lanes, sizeof(partial));
#pragma GCC unroll 4
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; ++i) partial[i] += partial[i + half];
  }
  return partial[0];
}

}  // namespace dgmoe
