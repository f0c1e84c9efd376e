#include "silu_and_mul_post_quant_masked.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kSiluAndMulPostQuantMaskedSchema); }
