#include "quant_group_fp8.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kQuantGroupFp8Schema); }
