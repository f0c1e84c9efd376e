// How the CPU kernels of the gated activations find their rows and compute a piece of one.
#pragma once

#include <algorithm>
#include <vector>

#include "../common/parallel.h"
#include "gated.h"

namespace dgmoe {

// Columns computed at once: whole groups of either size, few enough for the first cache.
constexpr int64_t kGatedChunk = 128;

DGMOE_HD void gated_chunk(const uint16_t* gate, const uint16_t* up, int64_t count, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = silu(bf16_to_float(gate[i])) * bf16_to_float(up[i]);
}

// Calls body(batch, begin, end) over the tiles that hold valid rows, in parallel. With a mask the
// work is counted first: a slab is mostly padding, and an even split of all its rows would leave
// most threads without work.
template <typename Body>
void for_gated_rows(const GatedPlan& plan, const Body& body) {
  if (!plan.masked) {
    parallel_items(plan.rows, plan.inter,
                   [&](int64_t begin, int64_t end) { body(int64_t{0}, begin, end); });
    return;
  }
  std::vector<int64_t> ends(plan.batches);
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

}  // namespace dgmoe
