#include "grouped_gemm_nt_f8f8bf16_contig.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kGroupedGemmNtF8f8bf16ContigSchema); }
