#include "silu_and_mul_post_quant_contig.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kSiluAndMulPostQuantContigSchema); }
