#include "ep_gather.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kEpGatherSchema); }
