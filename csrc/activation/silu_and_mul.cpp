#include "silu_and_mul.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kSiluAndMulSchema); }
