#include "tf32_hc_prenorm_gemm.h"

#include <algorithm>

#include "../common/contract.h"
#include "../common/parallel.h"
#include "cpu/gemm_tile_cpu.h"

namespace dgmoe {
namespace {

constexpr int64_t kBlockRows = 32;  // rows of x that share one copy of a panel of fn

DGMOE_INLINE void widen(const uint16_t* in, int64_t count, int64_t width, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = bf16_to_float(in[i]);
  for (int64_t i = count; i < width; ++i) out[i] = 0.0f;
}

DGMOE_INLINE float square_sum(const uint16_t* x, int64_t count) {
  Lanes sums{};
  float columns[kLanes];
  for (int64_t begin = 0; begin < count; begin += kLanes) {
    widen(x + begin, std::min(kLanes, count - begin), kLanes, columns);
    const Lanes lanes = *reinterpret_cast<const LoadLanes*>(columns);
    multiply_add(sums, lanes, lanes);
  }
  return sum_of(sums);
}

// Columns [first, first + kPanel) of `rows` rows of one piece of the result.
DGMOE_INLINE void multiply_panel(const Tf32HcPrenormGemmPlan& p, int64_t piece, int64_t row,
                                 int64_t rows, int64_t first) {
  float a[kBlockRows * kStep];
  float b[kPanel * kStep];
  Lanes sums[kBlockRows * kPanel];
  std::memset(sums, 0, sizeof(Lanes) * rows * kPanel);
  const int64_t end = p.piece_begin(piece + 1);
  for (int64_t begin = p.piece_begin(piece); begin < end; begin += kStep) {
    const int64_t count = std::min(kStep, end - begin);
    const int64_t width = round_up(count, kLanes);
    for (int64_t r = 0; r < rows; ++r) {
      widen(p.x + (row + r) * p.k + begin, count, width, a + r * kStep);
    }
    for (int64_t j = 0; j < kPanel; ++j) {
      // Past the last column repeat it; its sums are not stored.
      const int64_t column = std::min(first + j, p.n - 1);
      std::memcpy(b + j * kStep, p.fn + column * p.k + begin, count * sizeof(float));
      for (int64_t i = count; i < width; ++i) b[j * kStep + i] = 0.0f;
    }
    for (int64_t r = 0; r < rows; r += kTile) {
      add_rows(a + r * kStep, kStep, b, width, std::min(kTile, rows - r), sums + r * kPanel);
    }
  }
  float* out = p.out + (piece * p.m + row) * p.n + first;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < std::min(kPanel, p.n - first); ++j) {
      out[r * p.n + j] = sum_of(sums[r * kPanel + j]);
    }
  }
}

DGMOE_CPU_CLONES
void block_rows(const Tf32HcPrenormGemmPlan& p, int64_t piece, int64_t row, int64_t rows) {
  const int64_t begin = p.piece_begin(piece);
  const int64_t count = p.piece_begin(piece + 1) - begin;
  for (int64_t r = row; r < row + rows; ++r) {
    p.sqr_sum[piece * p.m + r] = square_sum(p.x + r * p.k + begin, count);
  }
  for (int64_t first = 0; first < p.n; first += kPanel) multiply_panel(p, piece, row, rows, first);
}

void tf32_hc_prenorm_gemm(const Tf32HcPrenormGemmPlan& plan) {
  const int64_t blocks = ceil_div(plan.m, kBlockRows);
  const int64_t work = kBlockRows * (plan.n + 1) * ceil_div(plan.k, plan.splits);
  parallel_items(plan.splits * blocks, work, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item % blocks * kBlockRows;
      block_rows(plan, item / blocks, row, std::min(kBlockRows, plan.m - row));
    }
  });
}

std::tuple<Tensor, Tensor> tf32_hc_prenorm_gemm_cpu(const Tensor& x, const Tensor& fn,
                                                    std::optional<int64_t> num_splits) {
  Tf32HcPrenormGemmCall call = plan_tf32_hc_prenorm_gemm(x, fn, num_splits);
  tf32_hc_prenorm_gemm(call.plan);
  return {call.out, call.sqr_sum};
}

void tf32_hc_prenorm_gemm_out_cpu(const Tensor& x, const Tensor& fn,
                                  std::optional<int64_t> num_splits, Tensor& out, Tensor& sqr_sum) {
  tf32_hc_prenorm_gemm(plan_tf32_hc_prenorm_gemm(x, fn, num_splits, out, sqr_sum).plan);
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) {
  m.def(dgmoe::kTf32HcPrenormGemmSchema);
  m.def(dgmoe::kTf32HcPrenormGemmOutSchema);
}
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CPU, m) {
  m.impl("tf32_hc_prenorm_gemm", DGMOE_BOX(dgmoe::tf32_hc_prenorm_gemm_cpu));
  m.impl("tf32_hc_prenorm_gemm.out", DGMOE_BOX(dgmoe::tf32_hc_prenorm_gemm_out_cpu));
}
DGMOE_CONTRACT(tf32_hc_prenorm_gemm, kTf32HcPrenormGemmOutSchema)
