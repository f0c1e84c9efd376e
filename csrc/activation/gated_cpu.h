// How the CPU kernels of the gated activations find their rows and compute a piece of one.
#pragma once

#include <algorithm>
#include <vector>

#include "../common/parallel.h"
#include "gated_quant.h"

namespace dgmoe {

// Columns computed at once: whole groups of either size, few enough for the first cache.
constexpr int64_t kGatedChunk = 128;

struct Bf16Columns {
  const uint16_t* at;
  DGMOE_HD float operator()(int64_t i) const { return bf16_to_float(at[i]); }
};

struct FloatColumns {
  const float* at;
  DGMOE_HD float operator()(int64_t i) const { return at[i]; }
};

template <bool kAdd>
DGMOE_HD void put(float& to, float value) {
  to = kAdd ? to + value : value;
}

// Gate and up of `count` columns from `column` on, stored or added.
template <bool kAdd, typename Columns>
DGMOE_HD void read_pairs(const GatedPlan& in, const Columns& from, int64_t column, int64_t count,
                         float* g, float* u) {
  if (in.gate_up_interleave == 1) {
    for (int64_t i = 0; i < count; ++i) {
      put<kAdd>(g[i], from(2 * (column + i)));
      put<kAdd>(u[i], from(2 * (column + i) + 1));
    }
  } else if (in.gate_up_interleave == 8) {
    for (int64_t first = 0; first < count; first += 8) {
      for (int64_t i = 0; i < 8; ++i) {
        put<kAdd>(g[first + i], from(2 * (column + first) + i));
        put<kAdd>(u[first + i], from(2 * (column + first) + 8 + i));
      }
    }
  } else {
    for (int64_t i = 0; i < count; ++i) put<kAdd>(g[i], from(column + i));
    for (int64_t i = 0; i < count; ++i) put<kAdd>(u[i], from(in.inter + column + i));
  }
}

template <typename Activation>
DGMOE_HD void apply_gated(const Activation& activation, int64_t count, const float* g,
                          const float* u, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = activation(g[i], u[i]);
}

// `bias` is the row of the bias that the row takes, or -1.
DGMOE_HD void gated_chunk(const GatedPlan& in, const uint16_t* row, int64_t bias, int64_t column,
                          int64_t count, float* y) {
  float g[kGatedChunk];
  float u[kGatedChunk];
  read_pairs<false>(in, Bf16Columns{row}, column, count, g, u);
  if (bias >= 0) {
    const int64_t offset = bias * in.bias.row_stride;
    if (in.bias.is_float) {
      const FloatColumns from{static_cast<const float*>(in.bias.data) + offset};
      read_pairs<true>(in, from, column, count, g, u);
    } else {
      const Bf16Columns from{static_cast<const uint16_t*>(in.bias.data) + offset};
      read_pairs<true>(in, from, column, count, g, u);
    }
  }
  const ActivationParams& params = in.activation;
  if (params.limited()) {
    for (int64_t i = 0; i < count; ++i) g[i] = clamp_above(g[i], params.limit);
    for (int64_t i = 0; i < count; ++i) u[i] = clamp_both(u[i], params.limit);
  }
  switch (params.kind) {
    case ActivationKind::kSilu:
      return apply_gated(Silu<ExactMath>(params), count, g, u, y);
    case ActivationKind::kSwigluOai:
      return apply_gated(SwigluOai<ExactMath>(params), count, g, u, y);
    case ActivationKind::kSitu:
      return apply_gated(Situ<ExactMath>(params), count, g, u, y);
  }
}

// Calls body(batch, begin, end) over the tiles that hold valid rows, in parallel. With a mask the
// work is counted first: a slab is mostly padding, and an even split of all its rows would leave
// most threads without work.
template <typename Body>
void for_gated_rows(const char* op, const GatedPlan& plan, const Body& body) {
  if (!plan.masked) {
    parallel_items(plan.rows, plan.inter,
                   [&](int64_t begin, int64_t end) { body(int64_t{0}, begin, end); });
    return;
  }
  auto ends = host_workspace<int64_t>(op, "ends of experts", plan.batches, 0);
  int64_t total = 0;
  for (int64_t batch = 0; batch < plan.batches; ++batch) {
    const int64_t valid = std::max<int64_t>(plan.masked_m[batch], 0);
    total += std::min(round_up(valid, plan.alignment), plan.rows);
    ends[batch] = total;
  }
  parallel_items(total, plan.inter, [&](int64_t begin, int64_t end) {
    int64_t batch = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    while (begin < end) {
      const int64_t first = batch == 0 ? 0 : ends[batch - 1];
      const int64_t stop = std::min(end, ends[batch]);
      if (begin < stop) body(batch, begin - first, stop - first);
      begin = stop;
      ++batch;
    }
  });
}

// ---- the CPU kernels, in gated_cpu.cpp ----

void gated_bf16_cpu(const char* op, const GatedBf16Plan& plan);
void gated_quant_cpu(const char* op, const GatedQuantPlan& plan);

}  // namespace dgmoe
