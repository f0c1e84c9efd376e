// How the CUDA kernels of the GEMM ops reach DeepGEMM, a Python package: a shape that has not run
// yet goes through Python (`dgmoe_ops/backends/deep_gemm`), which checks what the library takes and
// loads it; later calls of it go to the library's C function where its release exports one.
#pragma once

#include "../../common/cuda.cuh"
#include "../grouped_gemm.h"

namespace dgmoe {

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
  GroupedGemmSpec spec;  // granularities 0 where the call names none
  const Tensor* a;
  const Tensor* a_scale;  // null for bf16
  const Tensor* b;
  const Tensor* b_scale;  // null for bf16
  const Tensor* info;     // masked_m or m_indices; null for dense products
  Tensor* d;
  Tensor* sqr_sum = nullptr;  // of tf32_hc_prenorm_gemm
  int64_t num_splits = 0;     // likewise; 0 where the call names none
};

// Computes d. Empty products are answered without the library.
// Throws std::invalid_argument or std::runtime_error with the library's or the adapter's words.
void deep_gemm(const CudaScope& scope, const DeepGemmCall& call);

// The spec that a call passes on: without granularities where it names none, so that the library's
// default is meant.
inline GroupedGemmSpec passed_on(GroupedGemmSpec spec, bool named) {
  if (!named) spec.a_gran_k = spec.b_gran_mn = spec.b_gran_k = 0;
  return spec;
}

}  // namespace dgmoe
