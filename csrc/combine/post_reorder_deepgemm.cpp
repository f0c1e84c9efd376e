#include "post_reorder_deepgemm.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kPostReorderDeepgemmSchema); }
