#include "grouped_gemm_cpu.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "../common/parallel.h"

namespace dgmoe {
namespace {

// Partial sums of one output: fixed, so that every instruction set adds alike.
constexpr int64_t kLanes = 16;
constexpr int64_t kTile = 4;          // rows and columns of a register tile
constexpr int64_t kPanel = 16;        // columns of d, rows of b, that one work item computes
constexpr int64_t kStep = 256;        // columns of b widened at a time: a panel of them stays in L1
constexpr int64_t kBlockRows = 64;    // rows of a that share one widening of b
constexpr int64_t kChunkRows = 1024;  // rows of a widened at a time: bounds the scratch
constexpr int64_t kDenseRows = 128;   // from here on the machine's matrix product is faster

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef float LoadLanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

#define DGMOE_INLINE inline __attribute__((always_inline))

struct RowRange {
  int64_t expert, first, count;  // `first` counts rows of d
};

// Rows of e4m3 bytes with scales, or of bf16 where `scale` is null.
struct Operand {
  const void* data;
  const void* scale;
  ScaleLayout layout;
  int64_t gran_mn, gran_k, k;
};

struct Product {
  const float* a;  // `rows` widened rows, zero from k to a_stride
  int64_t a_stride;
  Operand b;
  int64_t expert, rows, n, k;
  uint16_t* d;  // the first of `rows` rows
};

DGMOE_INLINE void widen_bf16(const uint16_t* __restrict__ in, int64_t count,
                             float* __restrict__ out) {
  for (int64_t i = 0; i < count; ++i) out[i] = bf16_to_float(in[i]);
}

DGMOE_INLINE void widen_e4m3(const uint8_t* __restrict__ in, int64_t count, float scale,
                             float* __restrict__ out) {
  for (int64_t i = 0; i < count; ++i) out[i] = e4m3_to_float(in[i]) * scale;
}

// Columns [begin, end) of a row as fp32. `row` counts over all experts, `batch` and `scale_row`
// find its scales.
DGMOE_INLINE void widen(const Operand& x, int64_t row, int64_t batch, int64_t scale_row,
                        int64_t begin, int64_t end, float* out) {
  const int64_t base = row * x.k;
  if (x.scale == nullptr) {
    widen_bf16(static_cast<const uint16_t*>(x.data) + base + begin, end - begin, out);
    return;
  }
  for (int64_t column = begin; column < end;) {
    const int64_t group = column / x.gran_k;
    const int64_t count = std::min(end, (group + 1) * x.gran_k) - column;
    const float scale = load_scale(x.scale, x.layout, batch, scale_row / x.gran_mn, group);
    widen_e4m3(static_cast<const uint8_t*>(x.data) + base + column, count, scale, out);
    out += count;
    column += count;
  }
}

// Rows first + begin .. first + end to rows begin .. end of `out`, zero from k to `stride`.
DGMOE_CPU_CLONES
void widen_rows(const Operand& x, int64_t first, int64_t batch, int64_t scale_row, int64_t begin,
                int64_t end, float* out, int64_t stride) {
  for (int64_t r = begin; r < end; ++r) {
    widen(x, first + r, batch, scale_row + r, 0, x.k, out + r * stride);
    for (int64_t i = x.k; i < stride; ++i) out[r * stride + i] = 0.0f;
  }
}

DGMOE_CPU_CLONES
void round_to_bf16(const float* in, int64_t begin, int64_t end, uint16_t* out) {
  for (int64_t i = begin; i < end; ++i) out[i] = float_to_bf16(in[i]);
}

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
// registers meanwhile.
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

// Columns [first, first + kPanel) of d, for all rows of the product.
DGMOE_CPU_CLONES
void multiply_panel(const Product& p, int64_t first) {
  alignas(64) float b[kPanel * kStep];
  Lanes sums[kBlockRows * kPanel];
  for (int64_t block = 0; block < p.rows; block += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, p.rows - block);
    std::memset(sums, 0, sizeof(Lanes) * rows * kPanel);
    for (int64_t begin = 0; begin < p.k; begin += kStep) {
      const int64_t count = std::min(kStep, p.k - begin);
      const int64_t width = round_up(count, kLanes);
      for (int64_t j = 0; j < kPanel; ++j) {
        // Past the last column repeat it: the sums exist anyway and are not stored.
        const int64_t column = std::min(first + j, p.n - 1);
        widen(p.b, p.expert * p.n + column, p.expert, column, begin, begin + count, b + j * kStep);
        for (int64_t i = count; i < width; ++i) b[j * kStep + i] = 0.0f;
      }
      for (int64_t r = 0; r < rows; r += kTile) {
        add_rows(p.a + (block + r) * p.a_stride + begin, p.a_stride, b, width,
                 std::min(kTile, rows - r), sums + r * kPanel);
      }
    }
    const int64_t columns = std::min(kPanel, p.n - first);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < columns; ++j) {
        p.d[(block + r) * p.n + first + j] = float_to_bf16(sum_of(sums[r * kPanel + j]));
      }
    }
  }
}

void append(std::vector<RowRange>& ranges, int64_t expert, int64_t first, int64_t count) {
  for (int64_t done = 0; done < count; done += kChunkRows) {
    ranges.push_back({expert, first + done, std::min(kChunkRows, count - done)});
  }
}

std::vector<RowRange> row_ranges(const Check& check, const GroupedGemmPlan& plan) {
  std::vector<RowRange> ranges;
  const int32_t* info = plan.row_info;
  if (plan.masked) {
    const std::string must =
        "hold between 0 and m = " + std::to_string(plan.m) + " rows for each expert";
    for (int64_t e = 0; e < plan.experts; ++e) {
      check.that(info[e] >= 0 && info[e] <= plan.m, "masked_m", must, info[e]);
      append(ranges, e, e * plan.m, info[e]);
    }
    return ranges;
  }
  const std::string must =
      "hold experts below " + std::to_string(plan.experts) + ", or -1 for padding";
  for (int64_t row = 0; row < plan.m;) {
    int64_t end = row + 1;
    while (end < plan.m && info[end] == info[row]) ++end;
    check.that(info[row] >= -1 && info[row] < plan.experts, "m_indices", must, info[row]);
    if (info[row] >= 0) append(ranges, info[row], row, end - row);
    row = end;
  }
  return ranges;
}

// The few-row product: widens b panel by panel and never stores it, as decoding wants.
void multiply_panels(const Product& product) {
  parallel_items(ceil_div(product.n, kPanel), kPanel * product.k, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) multiply_panel(product, panel * kPanel);
  });
}

// The many-row product: the machine's own, on one expert's widened weight.
void multiply_dense(const Tensor& a, const Tensor& b, int64_t rows, uint16_t* d) {
  Tensor sums = empty({rows, b.size(0)}, ScalarType::Float, a);
  matmul_into(sums, first_rows(a, rows), torch::stable::transpose(b, 0, 1));
  const int64_t count = rows * sums.size(1);
  const float* in = static_cast<const float*>(data_of(sums));
  parallel_items(count, 1, [&](int64_t begin, int64_t end) { round_to_bf16(in, begin, end, d); });
}

bool batch_invariant() {
  const char* value = std::getenv("DGMOE_BATCH_INVARIANT");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

}  // namespace

void grouped_gemm_cpu(const char* op, const GroupedGemmPlan& plan, const Tensor& like) {
  const std::vector<RowRange> ranges = row_ranges(Check(op), plan);
  if (ranges.empty() || plan.n == 0) return;
  const Operand a{plan.a, plan.a_scale_data, plan.a_scale, 1, plan.a_gran_k, plan.k};
  const Operand b{plan.b, plan.b_scale_data, plan.b_scale, plan.b_gran_mn, plan.b_gran_k, plan.k};
  int64_t most_rows = 0;
  for (const RowRange& range : ranges) most_rows = std::max(most_rows, range.count);
  const int64_t stride = round_up(plan.k, kLanes);
  const int64_t dense_rows = batch_invariant() || plan.k == 0 ? INT64_MAX : kDenseRows;
  Tensor wide_a = empty({most_rows, stride}, ScalarType::Float, like);
  float* rows = static_cast<float*>(mutable_data_of(wide_a));
  // One expert's weight at a time; padded like a, so that both have the same width.
  Tensor wide_b = empty({most_rows >= dense_rows ? plan.n : 0, stride}, ScalarType::Float, like);
  int64_t widened = -1;  // the expert that wide_b holds
  for (const RowRange& range : ranges) {
    const int64_t batch = plan.masked ? range.expert : 0;
    const int64_t scale_row = range.first - batch * plan.m;
    parallel_items(range.count, plan.k, [&](int64_t begin, int64_t end) {
      widen_rows(a, range.first, batch, scale_row, begin, end, rows, stride);
    });
    uint16_t* d = plan.d + range.first * plan.n;
    if (range.count < dense_rows) {
      multiply_panels({rows, stride, b, range.expert, range.count, plan.n, plan.k, d});
      continue;
    }
    if (widened != range.expert) {
      float* weight = static_cast<float*>(mutable_data_of(wide_b));
      parallel_items(plan.n, plan.k, [&](int64_t begin, int64_t end) {
        widen_rows(b, range.expert * plan.n, range.expert, 0, begin, end, weight, stride);
      });
      widened = range.expert;
    }
    multiply_dense(wide_a, wide_b, range.count, d);
  }
}

}  // namespace dgmoe
