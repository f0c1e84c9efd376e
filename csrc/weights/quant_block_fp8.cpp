#include "quant_block_fp8.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kQuantBlockFp8Schema); }
