#include "grouped_gemm_nt_bf16_contig.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kGroupedGemmNtBf16ContigSchema); }
