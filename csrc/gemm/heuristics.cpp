#include "heuristics.h"

#include "../common/check.h"

namespace dgmoe {
namespace {

std::vector<int64_t> gemm_plan(int64_t layout, int64_t experts, int64_t m, int64_t n, int64_t k,
                               int64_t expected_m, int64_t a_gran_k, int64_t b_gran_mn,
                               int64_t b_gran_k, bool fp4, int64_t arch) {
  const Check check("_gemm_plan");
  check.that(layout >= 0 && layout <= 2, "layout", "be 0 (dense), 1 (contig) or 2 (masked)",
             layout);
  check.count("experts", experts);
  // Above what tensors hold, but no product wraps.
  for (const auto& [name, size] : {std::pair{"m", m}, {"n", n}, {"k", k}}) {
    check.that(size >= 0 && size <= int64_t{1} << 40, name, "be at least 0 and at most 2^40", size);
  }
  const bool masked = layout == static_cast<int64_t>(GemmLayout::kMasked);
  if (masked) check.at_least("expected_m", expected_m, 1);
  const GroupedGemmSpec spec{static_cast<GemmLayout>(layout), experts,  m,         n,        k,
                             masked ? expected_m : 0,         a_gran_k, b_gran_mn, b_gran_k, fp4};
  const GemmChoice choice = choose_gemm(spec, arch);
  return {static_cast<int64_t>(choice.kernel),
          choice.expected_rows,
          choice.block_m,
          choice.m_blocks,
          choice.experts_per_launch,
          choice.rows_bytes,
          choice.flags_bytes,
          choice.tiles_bytes};
}

}  // namespace
}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) {
  m.def(
      "_gemm_plan(int layout, int experts, int m, int n, int k, int expected_m, int a_gran_k, int"
      " b_gran_mn, int b_gran_k, bool fp4, int arch) -> int[]");
}
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CompositeExplicitAutograd, m) {
  m.impl("_gemm_plan", DGMOE_BOX(dgmoe::gemm_plan));
}
