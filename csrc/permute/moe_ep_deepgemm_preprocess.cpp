#include "moe_ep_deepgemm_preprocess.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kMoeEpDeepgemmPreprocessSchema); }
