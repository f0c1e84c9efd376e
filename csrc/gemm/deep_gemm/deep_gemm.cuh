// How the CUDA kernels of the GEMM ops reach DeepGEMM, a Python package: a shape that has not run
// yet goes through Python (`dgmoe_ops/backends/deep_gemm`), which checks what the library takes and
// loads it; later calls of it go to the library's C function where its release exports one.
#pragma once

#include "../../common/cuda.cuh"
#include "../grouped_gemm.h"

namespace dgmoe {

// What the scopes that this thread is in ask for (dgmoe_ops/backends/scopes.py).
struct GemmSettings {
  int64_t alignment = 0;  // of segments; 0 where nothing is asked
  int64_t num_sms = 0;    // likewise
  int64_t pdl = -1;       // 0 or 1; -1 where nothing is asked
  bool overlap = false;
};
const GemmSettings& gemm_settings();

// In the order of OPS in dgmoe_ops/backends/request.py.
enum class DeepGemmOp : int64_t {
  kGroupedF8Masked,
  kGroupedF8Contig,
  kGroupedBf16Masked,
  kGroupedBf16Contig,
  kF8,
  kMxf8,
  kBf16F32,
  kTf32HcPrenorm,
};
constexpr int kDeepGemmOps = 8;

// One product, checked and allocated by the op's contract.
struct DeepGemmCall {
  DeepGemmOp op;
  const char* name;
  const Tensor* a;
  const Tensor* a_scale;  // null for bf16
  const Tensor* b;
  const Tensor* b_scale;  // null for bf16
  const Tensor* info;     // masked_m or m_indices; null for dense products
  int64_t experts, m, n, k;
  int64_t expected_m;                                         // 0 where the op has none
  int64_t recipe_a_columns, recipe_b_rows, recipe_b_columns;  // 0 where the call names none
  int64_t num_splits;                                         // 0 where the call names none
  Tensor* d;
  Tensor* sqr_sum;  // of tf32_hc_prenorm_gemm, else null
};

// Computes d. Empty products are answered without the library.
// Throws std::invalid_argument or std::runtime_error with the library's or the adapter's words.
void deep_gemm(const CudaScope& scope, const DeepGemmCall& call);

inline int64_t columns_of(const std::optional<std::vector<int64_t>>& recipe) {
  return recipe.has_value() ? (*recipe)[1] : 0;
}

inline int64_t rows_of(const std::optional<std::vector<int64_t>>& recipe) {
  return recipe.has_value() ? (*recipe)[0] : 0;
}

}  // namespace dgmoe
