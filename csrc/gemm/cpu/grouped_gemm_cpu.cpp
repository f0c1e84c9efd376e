#include "grouped_gemm_cpu.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../../common/env.h"
#include "../../common/parallel.h"
#include "widen_cpu.h"

namespace dgmoe {
namespace {

constexpr int64_t kBlockRows = 64;    // rows of a for which b is dequantised once
constexpr int64_t kChunkRows = 1024;  // rows of a dequantised at a time: bounds the workspace
constexpr int64_t kDenseRows = 128;   // from here on PyTorch's matrix product is faster

struct RowRange {
  int64_t expert, first, count;  // `first` counts rows of d
};

// Rows of the result: bf16, or fp32.
struct Rows {
  void* data;
  bool fp32;

  DGMOE_INLINE Rows from(int64_t offset) const {
    if (fp32) return {static_cast<float*>(data) + offset, true};
    return {static_cast<uint16_t*>(data) + offset, false};
  }
  DGMOE_INLINE void store(int64_t offset, float value) const {
    if (fp32) {
      static_cast<float*>(data)[offset] = value;
    } else {
      static_cast<uint16_t*>(data)[offset] = float_to_bf16(value);
    }
  }
};

struct Product {
  const float* a;  // `rows` rows as fp32, zero from k to a_stride
  int64_t a_stride;
  Operand b;
  int64_t expert, rows, n, k;
  Rows d;  // the first of `rows` rows
};

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
void store_all(const float* in, int64_t begin, int64_t end, Rows out) {
  if (out.fp32) {
    std::memcpy(static_cast<float*>(out.data) + begin, in + begin, (end - begin) * sizeof(float));
    return;
  }
  uint16_t* narrow = static_cast<uint16_t*>(out.data);
  for (int64_t i = begin; i < end; ++i) narrow[i] = float_to_bf16(in[i]);
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
        // Past the last column repeat it; its sums are not stored.
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
        p.d.store((block + r) * p.n + first + j, sum_of(sums[r * kPanel + j]));
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
  if (plan.masked()) {
    const std::string must =
        "hold between 0 and m = " + std::to_string(plan.m) + " rows for each expert";
    for (int64_t e = 0; e < plan.experts; ++e) {
      check.that(info[e] >= 0 && info[e] <= plan.m, "masked_m", must, info[e]);
      append(ranges, e, e * plan.m, info[e]);
    }
    return ranges;
  }
  if (plan.layout == GemmLayout::kDense) {
    append(ranges, 0, 0, plan.m);
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

std::vector<RowRange> row_ranges_or_throw(const char* op, const GroupedGemmPlan& plan) {
  try {
    return row_ranges(Check(op), plan);
  } catch (const std::bad_alloc&) {
    throw std::runtime_error("dgmoe::" + std::string(op) + ": the rows of " +
                             std::to_string(plan.experts) +
                             " experts must fit into the memory of the host, got none left");
  }
}

// Small M: dequantises b panel by panel, which stays in L1, and never stores it.
void multiply_panels(const Product& product) {
  parallel_items(ceil_div(product.n, kPanel), kPanel * product.k, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) multiply_panel(product, panel * kPanel);
  });
}

// Large M: PyTorch's matrix product, on one expert's dequantised weight.
void multiply_dense(const char* op, const Tensor& a, const Tensor& b, int64_t rows, Rows d) {
  Tensor sums = empty(op, "sums of a product", {rows, b.size(0)}, ScalarType::Float, a);
  matmul_into(sums, first_rows(a, rows), torch::stable::transpose(b, 0, 1));
  const int64_t count = rows * sums.size(1);
  const float* in = static_cast<const float*>(data_of(sums));
  parallel_items(count, 1, [&](int64_t begin, int64_t end) { store_all(in, begin, end, d); });
}

}  // namespace

void grouped_gemm_cpu(const char* op, const GroupedGemmPlan& plan, const Tensor& like) {
  const bool batch_invariant = env_flag("DGMOE_BATCH_INVARIANT");
  const std::vector<RowRange> ranges = row_ranges_or_throw(op, plan);
  if (ranges.empty() || plan.n == 0) return;
  const Operand a{plan.a, false, plan.a_scale_data, plan.a_scale, 1, plan.a_gran_k, plan.k};
  const Operand b{plan.b,        plan.b_fp4, plan.b_scale_data, plan.b_scale, plan.b_gran_mn,
                  plan.b_gran_k, plan.k};
  int64_t most_rows = 0;
  for (const RowRange& range : ranges) most_rows = std::max(most_rows, range.count);
  const int64_t stride = round_up(plan.k, kLanes);
  const int64_t dense_rows = batch_invariant || plan.k == 0 ? INT64_MAX : kDenseRows;
  Tensor wide_a = empty(op, "rows of a in fp32", {most_rows, stride}, ScalarType::Float, like);
  float* rows = static_cast<float*>(mutable_data_of(wide_a));
  // One expert's weight at a time; padded like a, so that both have the same width.
  Tensor wide_b = empty(op, "an expert of b in fp32",
                        {most_rows >= dense_rows ? plan.n : 0, stride}, ScalarType::Float, like);
  int64_t dequantised = -1;  // the expert whose weight wide_b is
  for (const RowRange& range : ranges) {
    const int64_t batch = plan.masked() ? range.expert : 0;
    const int64_t scale_row = range.first - batch * plan.m;
    parallel_items(range.count, plan.k, [&](int64_t begin, int64_t end) {
      widen_rows(a, range.first, batch, scale_row, begin, end, rows, stride);
    });
    const Rows d = Rows{plan.d, plan.d_fp32}.from(range.first * plan.n);
    if (range.count < dense_rows) {
      multiply_panels({rows, stride, b, range.expert, range.count, plan.n, plan.k, d});
      continue;
    }
    if (dequantised != range.expert) {
      float* weight = static_cast<float*>(mutable_data_of(wide_b));
      parallel_items(plan.n, plan.k, [&](int64_t begin, int64_t end) {
        widen_rows(b, range.expert * plan.n, range.expert, 0, begin, end, weight, stride);
      });
      dequantised = range.expert;
    }
    multiply_dense(op, wide_a, wide_b, range.count, d);
  }
}

}  // namespace dgmoe
