#include "moe_dispatch_index.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kMoeDispatchIndexSchema); }
