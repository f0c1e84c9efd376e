// What the CUDA kernels of this room share to place rows: the ranking (defined in
// moe_dispatch_index.cu), 16-byte pieces of rows, and the scales of padding rows.
#pragma once

#include "../common/cuda.cuh"
#include "moe_dispatch_index.h"

namespace dgmoe {

// Contiguous segments, one an expert, each padded to `alignment` rows; null offsets mean a masked
// slab.
struct Segments {
  int32_t* offsets = nullptr;
  int64_t alignment = 1;
};

// Fills plan.masked_m with the rows of each expert and plan.src2dst with where rank r of expert e
// goes, or -1: row e * m_max + r of a slab, or offsets[e] + r of the segments, whose offsets it
// fills too.
void rank_rows(const char* op, const CudaScope& scope, const DispatchIndexPlan& plan,
               const Tensor& like, Segments segments = {});

constexpr int64_t kPieceBytes = 16;

// Bytes [offset, offset + 16) of a row of `bytes` bytes, zero beyond its end.
__device__ __forceinline__ uint4 load_piece(const uint8_t* row, int64_t offset, int64_t bytes,
                                            bool aligned) {
  if (aligned && offset + kPieceBytes <= bytes) {
    return *reinterpret_cast<const uint4*>(row + offset);
  }
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kPieceBytes; ++i) {
    if (offset + i < bytes) {
      words[i / 4] |= static_cast<uint32_t>(row[offset + i]) << (8 * (i % 4));
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// `aligned` says that every row of the result is a whole number of pieces.
__device__ __forceinline__ void store_piece(uint8_t* row, int64_t offset, int64_t bytes,
                                            bool aligned, uint4 piece) {
  if (aligned) {
    *reinterpret_cast<uint4*>(row + offset) = piece;
    return;
  }
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < kPieceBytes; ++i) {
    if (offset + i < bytes) row[offset + i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
  }
}

__device__ __forceinline__ bool any_row(const int32_t* rows, int64_t top_k) {
  bool any = false;  // no early exit, so that the loads overlap
#pragma unroll 8
  for (int64_t slot = 0; slot < top_k; ++slot) any |= __ldg(rows + slot) >= 0;
  return any;
}

// Calls store(row) for each slot of a token that has a row. Reads eight slots ahead of the stores,
// which the compiler must take for possible aliases.
template <typename Store>
__device__ __forceinline__ void for_each_row(const int32_t* rows, int64_t top_k,
                                             const Store& store) {
  constexpr int kBatch = 8;
  for (int64_t first = 0; first < top_k; first += kBatch) {
    int32_t batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) batch[i] = first + i < top_k ? __ldg(rows + first + i) : -1;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (batch[i] >= 0) store(static_cast<int64_t>(batch[i]));
    }
  }
}

// Gives the padding rows [begin, end) scale 1; `thread` of `threads` take part.
__device__ __forceinline__ void store_unit_scales(void* scale, const ScaleStrides& strides,
                                                  int64_t batch, int64_t begin, int64_t end,
                                                  int64_t thread, int64_t threads) {
  const int64_t columns = strides.columns();
  const int64_t rows = end - begin;
  const bool rows_first = strides.row_stride == 1;
  const int64_t fast = rows_first ? rows : columns;
  for (int64_t i = thread; i < rows * columns; i += threads) {
    const int64_t outer = i / fast;
    const int64_t inner = i - outer * fast;
    store_unit_scale(scale, strides, batch, begin + (rows_first ? inner : outer),
                     rows_first ? outer : inner);
  }
}

}  // namespace dgmoe
