// Index arithmetic of the MoE layouts and scale tensors: row counts, paddings, the offset of a
// scale. No torch include.
#pragma once

#include <cstdint>

#include "numerics.h"

namespace dgmoe {

// The tile of rows within which a GEMM may read past an expert's valid rows.
constexpr int64_t kTileRows = 128;
// Rows of one expert's slab come in these steps: a multiple of every BLOCK_M that a masked GEMM
// stores with.
constexpr int64_t kSlabRows = 256;
// TMA wants the leading dimension in 16-byte steps: four fp32 or int32 elements.
constexpr int64_t kTmaElements = 4;
constexpr int64_t kGroupsPerWord = 4;
constexpr int64_t kWeightBlock = 128;

DGMOE_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
DGMOE_HD int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
DGMOE_HD int64_t tma_aligned(int64_t mn) { return round_up(mn, kTmaElements); }
DGMOE_HD int64_t slab_rows(int64_t tokens) { return round_up(tokens, kSlabRows); }

// The most rows that `assignments` rows over `experts` experts can take when each used expert's
// segment is padded to `alignment`; reached, so no smaller static bound exists.
DGMOE_HD int64_t contig_rows(int64_t assignments, int64_t experts, int64_t alignment) {
  const int64_t used = assignments < experts ? assignments : experts;
  return used == 0 ? 0 : alignment * (used + (assignments - used) / alignment);
}

enum class ScaleLayout : int64_t {
  kRowMajor = 0,     // fp32 (..., mn, groups), contiguous: for exchange between ranks
  kMnMajor = 1,      // fp32 (..., mn, groups), strides (1, tma_aligned(mn)): SM90
  kPackedUe8m0 = 2,  // int32 (..., mn, ceil(groups / 4)), four exponent bytes a word, MN-major:
                     // SM100 and SM120
};

// A scale tensor as kernels see it. Strides count elements of the tensor: fp32 values, or int32
// words when packed.
struct ScaleStrides {
  ScaleLayout layout;
  int64_t groups;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t column_stride;

  DGMOE_HD bool packed() const { return layout == ScaleLayout::kPackedUe8m0; }
  DGMOE_HD int64_t columns() const { return packed() ? ceil_div(groups, kGroupsPerWord) : groups; }
  // Element offset of column `column` (a group, or a word of four groups) of row `row`.
  DGMOE_HD int64_t at(int64_t batch, int64_t row, int64_t column) const {
    return batch * batch_stride + row * row_stride + column * column_stride;
  }
};

DGMOE_HD void store_scale(void* base, const ScaleStrides& strides, int64_t batch, int64_t row,
                          int64_t group, const GroupScale& value) {
  if (!strides.packed()) {
    static_cast<float*>(base)[strides.at(batch, row, group)] = value.scale;
    return;
  }
  const int64_t word = strides.at(batch, row, group / kGroupsPerWord);
  uint8_t* bytes = static_cast<uint8_t*>(base) + word * 4;
  bytes[group % kGroupsPerWord] = value.exponent;
  if (group == strides.groups - 1) {
    for (int64_t tail = group % kGroupsPerWord + 1; tail < kGroupsPerWord; ++tail) bytes[tail] = 0;
  }
}

DGMOE_HD float load_scale(const void* base, const ScaleStrides& strides, int64_t batch, int64_t row,
                          int64_t group) {
  if (!strides.packed()) return static_cast<const float*>(base)[strides.at(batch, row, group)];
  const int64_t word = strides.at(batch, row, group / kGroupsPerWord);
  return ue8m0_to_float(static_cast<const uint8_t*>(base)[word * 4 + group % kGroupsPerWord]);
}

// One scale column of a padding row that shares a tile with valid rows: scale 1, tail bytes zero.
DGMOE_HD void store_unit_scale(void* base, const ScaleStrides& strides, int64_t batch, int64_t row,
                               int64_t column) {
  const int64_t offset = strides.at(batch, row, column);
  if (!strides.packed()) {
    static_cast<float*>(base)[offset] = 1.0f;
    return;
  }
  const int64_t left = strides.groups - column * kGroupsPerWord;
  static_cast<uint32_t*>(base)[offset] =
      left >= kGroupsPerWord ? 0x7f7f7f7fu : 0x7f7f7f7fu >> (8 * (kGroupsPerWord - left));
}

// Token ids or other small integer matrices: int32 or int64, any strides.
struct IdMatrix {
  const void* data;
  bool is_int64;
  int64_t row_stride;
  int64_t column_stride;

  DGMOE_HD int64_t operator()(int64_t row, int64_t column) const {
    const int64_t offset = row * row_stride + column * column_stride;
    return is_int64 ? static_cast<const int64_t*>(data)[offset]
                    : static_cast<const int32_t*>(data)[offset];
  }
  // The local expert of a slot, or -1: negative ids, sentinels and other ranks' experts are not
  // routed here.
  DGMOE_HD int64_t local_expert(int64_t row, int64_t column, int64_t expert_start,
                                int64_t num_local_experts) const {
    const int64_t id = (*this)(row, column);
    // Neither start + experts nor id - start may wrap.
    return id >= expert_start && id - expert_start < num_local_experts ? id - expert_start : -1;
  }
};

// Routing weights: fp32, bf16 or fp16, any strides; widened to fp32.
enum class WeightKind : int32_t { kFloat = 0, kBf16 = 1, kHalf = 2 };

struct WeightMatrix {
  const void* data;
  WeightKind kind;
  int64_t row_stride;
  int64_t column_stride;

  DGMOE_HD float operator()(int64_t row, int64_t column) const {
    const int64_t offset = row * row_stride + column * column_stride;
    if (kind == WeightKind::kFloat) return static_cast<const float*>(data)[offset];
    const uint16_t bits = static_cast<const uint16_t*>(data)[offset];
    return kind == WeightKind::kBf16 ? bf16_to_float(bits) : half_to_float(bits);
  }
};

}  // namespace dgmoe
