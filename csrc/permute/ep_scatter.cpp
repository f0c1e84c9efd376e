#include "ep_scatter.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kEpScatterSchema); }
