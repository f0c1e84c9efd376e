// The CUDA kernels of the gated activations as the ops call them, and their launch for a sink.
#pragma once

#include "../common/env.h"
#include "gated_math.cuh"
#include "gated_quant.h"
#include "gated_walk.cuh"

namespace dgmoe {

void gated_bf16_cuda(const GatedBf16Plan& plan, const CudaScope& scope);    // gated_cuda.cu
void gated_quant_cuda(const GatedQuantPlan& plan, const CudaScope& scope);  // gated_quant_cuda.cu

// DGMOE_EXACT_ACTIVATION: the bits of the CPU.
inline bool exact_activation() { return env_flag("DGMOE_EXACT_ACTIVATION"); }

// CTAs for each that is resident. With much work, several waves balance the load of the SMs; with
// little, each CTA more costs its reads of the counts. Only the device knows how many rows are
// valid, so the capacity decides.
inline int64_t gated_waves(const GatedPlan& in) {
  const bool many = in.masked ? in.rows >= 2048 : in.rows >= 40 * 1024;
  return !many ? 1 : in.inter < 1536 ? 4 : 8;
}

template <typename Activation, GatedCase kCase, typename Sink>
void launch_gated_case(const GatedPlan& in, const CudaScope& scope, const Sink& sink) {
  const GatedTiling tiling = GatedTiling::of(in.inter);
  const int64_t resident = gated_resident(kCase) * kGatedThreads / tiling.threads;
  const unsigned grid =
      grid_for(ceil_div(in.batches * in.rows, tiling.rows), resident * gated_waves(in));
  const int shared = kCase == GatedCase::kAny ? 0 : tiling.threads * GatedStages::kBytesAThread;
  if (in.masked) {
    DGMOE_LAUNCH((gated_masked_kernel<Activation, kCase, Sink>), grid, tiling.threads, shared,
                 scope, in, tiling, sink);
  } else {
    DGMOE_LAUNCH((gated_contig_kernel<Activation, kCase, Sink>), grid, tiling.threads, shared,
                 scope, in, tiling, sink);
  }
}

template <template <typename> class Activation, typename Sink>
void launch_gated_as(const GatedPlan& in, const CudaScope& scope, const Sink& sink) {
  if (exact_activation()) {
    launch_gated_case<Activation<ExactMath>, GatedCase::kAny>(in, scope, sink);
  } else if (in.inter % kGatedColumns != 0) {
    launch_gated_case<Activation<FastMath>, GatedCase::kAny>(in, scope, sink);
  } else if (in.bias.data != nullptr) {
    launch_gated_case<Activation<FastMath>, GatedCase::kBias>(in, scope, sink);
  } else {
    launch_gated_case<Activation<FastMath>, GatedCase::kPlain>(in, scope, sink);
  }
}

template <typename Sink>
void launch_gated(const GatedPlan& in, const CudaScope& scope, const Sink& sink) {
  if (in.inter == 0) return;
  switch (in.activation.kind) {
    case ActivationKind::kSilu:
      return launch_gated_as<Silu>(in, scope, sink);
    case ActivationKind::kSwigluOai:
      return launch_gated_as<SwigluOai>(in, scope, sink);
    case ActivationKind::kSitu:
      return launch_gated_as<Situ>(in, scope, sink);
  }
}

}  // namespace dgmoe
