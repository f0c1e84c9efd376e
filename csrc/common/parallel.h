// How CPU kernels run: rows over torch's own threads, and row functions compiled once for each
// instruction set.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

// The loader picks the widest clone that the machine runs. All clones give the same bits:
// contraction is off, and the multiply-adds are explicit. A lambda does not inherit the clones, so
// put loops into plain functions.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DGMOE_CPU_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DGMOE_CPU_CLONES
#endif

namespace dgmoe {

// Work, in elements, below which a second thread costs more than it saves.
constexpr int64_t kGrainElements = 16384;

// Calls body(begin, end) over [0, items), each item being about `elements` elements of work. `body`
// must not throw.
template <typename Body>
void parallel_items(int64_t items, int64_t elements, const Body& body) {
  if (items <= 0) return;
  const int64_t grain =
      elements >= kGrainElements ? 1 : kGrainElements / (elements > 0 ? elements : 1) + 1;
  torch::stable::parallel_for(0, items, grain, body);
}

}  // namespace dgmoe
