// Which kernel runs a grouped GEMM, with which tile and workspace: what the ops' host code goes by,
// and dgmoe::_gemm_plan tells planning, warm-up, doctor and tests. From sizes and formats alone, so
// that nothing here waits for a device; neither CUDA nor torch is included.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/layout.h"

namespace dgmoe {

enum class GemmLayout : int32_t {
  kDense = 0,   // a (m, k), b (n, k): expert 0 owns every row
  kContig = 1,  // a (m, k), b (E, n, k): segments of rows, m_indices names their experts
  kMasked = 2,  // a (E, m, k), b (E, n, k): slabs, masked_m counts their valid rows
};

// Rows and columns that one scale covers.
struct Granularity {
  int64_t mn, k;
};

// One grouped GEMM by its sizes and formats: GroupedGemmSpec in dgmoe_ops/formats/gemm.py.
struct GroupedGemmSpec {
  GemmLayout layout;
  int64_t experts, m, n, k;  // m: rows of a slab, or of all segments; 1 expert where dense
  int64_t expected_m;        // the hint of a masked GEMM, at least 1; otherwise 0
  int64_t a_gran_k;          // columns that a scale of a covers; 0 for bf16
  int64_t b_gran_mn, b_gran_k;
  bool b_fp4;  // b holds two e2m1 codes a byte

  DGMOE_HD bool masked() const { return layout == GemmLayout::kMasked; }
};

// In the order of Kernel in dgmoe_ops/backends/heuristics.py.
enum class GemmKernel : int64_t {
  kNone,      // nothing is multiplied
  kCpu,       // ours
  kDeepGemm,  // it has it, or refuses it
  kSm90MxSmallM,
  kSm90MxMediumM,
  kSm90MxLargeM,
  kTriton,  // likewise
};

struct GemmChoice {
  GemmKernel kernel = GemmKernel::kNone;
  int64_t expected_rows = 0;  // of an expert
  int64_t block_m = 0;        // rows of a tile, of the sm90_mx kernels
  // Of sm90_mx_medium_m and sm90_mx_large_m: blocks of kMxBlockM rows that one launch takes, and the
  // bytes of their workspace, in this order, each part on kWorkspaceAlignment.
  int64_t m_blocks = 0;
  int64_t experts_per_launch = 0;  // of slabs
  int64_t rows_bytes = 0;          // of a, prepared
  int64_t flags_bytes = 0;
  int64_t tiles_bytes = 0;

  int64_t workspace_bytes() const { return rows_bytes + flags_bytes + tiles_bytes; }
};

// ---- the MX recipes on SM90 ----

constexpr int64_t kSmallMMaxRows = 14;     // expected of an expert, by measurement
constexpr int64_t kMediumMMaxRows = 72;    // likewise
constexpr int64_t kMxBlockM = 128;         // rows of a segment, and of an M block of a slab
constexpr int64_t kMxBlockK = 128;         // k is a multiple of it
constexpr int64_t kMxWeightAlignment = 8;  // n is a multiple of it, of the cluster kernels
constexpr int64_t kMxClusterN = 256;       // rows of a weight that a cluster of two CTAs multiplies
constexpr int64_t kMxFlagsPerBlockM = 4;   // int32, of sm90_mx_large_m
constexpr int64_t kMxTileBytes = 16;       // of an entry of the list of tiles
constexpr int64_t kSmallMMaxSlabsOrSegments = 1024;
constexpr int64_t kSmallMMaxLocalExperts = 65535;
constexpr int64_t kSmallMWeightRows = 64;  // of a CTA
constexpr int64_t kMaxExpertsPerLaunch = 2048;
constexpr int64_t kMaxWorkspaceRowBytes = int64_t{8} << 30;
constexpr int64_t kWorkspaceAlignment = 128;

// Rows that an expert is expected to have, by what is known without the device.
inline int64_t expected_rows(const GroupedGemmSpec& spec) {
  if (spec.masked()) return spec.expected_m;
  if (spec.layout == GemmLayout::kDense) return spec.m;
  const int64_t segments = ceil_div(spec.m, kMxBlockM);
  if (spec.experts == 0 || segments < spec.experts) return 1;
  // What is left of the segments when each expert has one. Where nothing is, they may be full or
  // nearly empty: sm90_mx_medium_m then takes at most half as long again as sm90_mx_large_m or a
  // quarter as sm90_mx_small_m, which on full segments takes three times as long.
  const int64_t more = segments - spec.experts;
  if (more == 0) return kSmallMMaxRows + 1;
  return more * kMxBlockM / spec.experts + 1;
}

// Whether a grouped GEMM has MX weights, for which DeepGEMM has no kernels on SM90.
inline bool is_mx(const GroupedGemmSpec& spec) {
  return spec.layout != GemmLayout::kDense && spec.b_gran_mn == 1 && spec.b_gran_k == 32;
}

inline bool fits_small_m(const GroupedGemmSpec& spec) {
  const int64_t items = spec.masked() ? spec.experts : ceil_div(spec.m, kMxBlockM);
  return spec.k <= INT32_MAX && spec.n <= INT32_MAX - kSmallMWeightRows && spec.m <= INT32_MAX &&
         spec.experts <= kSmallMMaxLocalExperts && items <= kSmallMMaxSlabsOrSegments;
}

// Bytes of a block of kMxBlockM prepared rows: e4m3 and the scales as fp32, or bf16.
inline int64_t prepared_bytes(const GroupedGemmSpec& spec, bool medium) {
  if (!medium) return kMxBlockM * spec.k * 2;
  const int64_t scales = spec.a_gran_k == 32 ? 4 : 1;  // of kMxBlockK columns
  return spec.k / kMxBlockK * kMxBlockM * (kMxBlockK + 4 * scales);
}

// Whether the cluster kernels take it; then what they allocate is in `choice`.
inline bool fits_cluster(const GroupedGemmSpec& spec, bool medium, GemmChoice& choice) {
  if (spec.n % kMxWeightAlignment != 0) return false;
  if (!spec.masked() && spec.m % kMxBlockM != 0) return false;
  // Offsets inside of a weight, of an M block, and of tiles fit in 32 bits.
  if (spec.n > INT32_MAX || spec.k > INT32_MAX / kMxBlockM || spec.m > INT32_MAX) return false;
  if (spec.n * spec.k > INT32_MAX) return false;
  const int64_t block_bytes = prepared_bytes(spec, medium);
  const int64_t most =
      std::min(kMaxWorkspaceRowBytes / block_bytes, INT32_MAX / 2 / ceil_div(spec.n, kMxClusterN));
  const int64_t batch_blocks = ceil_div(spec.m, kMxBlockM);  // of a slab, or all segments
  if (batch_blocks > most) return false;
  const int64_t batches = spec.masked() ? spec.experts : 1;
  // Slabs that are too many for one launch go in equal parts, one after the other.
  const int64_t parts = ceil_div(batches, std::min(kMaxExpertsPerLaunch, most / batch_blocks));
  choice.experts_per_launch = ceil_div(batches, parts);
  choice.m_blocks = choice.experts_per_launch * batch_blocks;
  const int64_t flags = medium ? 0 : choice.m_blocks * kMxFlagsPerBlockM * 4;
  choice.rows_bytes = round_up(choice.m_blocks * block_bytes, kWorkspaceAlignment);
  choice.flags_bytes = round_up(flags, kWorkspaceAlignment);
  choice.tiles_bytes = round_up((choice.m_blocks + 1) * kMxTileBytes, kWorkspaceAlignment);
  return true;
}

inline void choose_sm90_mx(const GroupedGemmSpec& spec, GemmChoice& choice) {
  choice.kernel = GemmKernel::kTriton;
  const bool narrow_fp4 = spec.b_fp4 && spec.a_gran_k == 32;
  if (spec.k % kMxBlockK != 0 || narrow_fp4) return;
  const int64_t rows = choice.expected_rows;
  if (rows <= kSmallMMaxRows && fits_small_m(spec)) {
    choice.kernel = GemmKernel::kSm90MxSmallM;
    // A tile of more rows reads weights less often; one of fewer lets more CTAs run. Measured.
    choice.block_m = rows <= (spec.b_fp4 ? 6 : 4) ? 8 : 16;
    return;
  }
  const bool medium = rows <= kMediumMMaxRows;
  if (!fits_cluster(spec, medium, choice)) return;
  choice.kernel = medium ? GemmKernel::kSm90MxMediumM : GemmKernel::kSm90MxLargeM;
  choice.block_m = medium ? kMxBlockM : 2 * kMxBlockM;
}

// Chooses for an architecture, compute capability major * 10 + minor, or 0 for the CPU. The sm90_mx
// kernels want a and b on 16 bytes and run without DGMOE_SANITY_CHECK; else Triton has them.
inline GemmChoice choose_gemm(const GroupedGemmSpec& spec, int64_t arch) {
  GemmChoice choice;
  choice.expected_rows = expected_rows(spec);
  if (spec.m == 0 || spec.n == 0 || spec.experts == 0 || spec.k == 0) return choice;
  if (arch == 0) {
    choice.kernel = GemmKernel::kCpu;
  } else if (arch == 90 && is_mx(spec)) {
    choose_sm90_mx(spec, choice);
  } else {
    choice.kernel = GemmKernel::kDeepGemm;
  }
  return choice;
}

}  // namespace dgmoe
