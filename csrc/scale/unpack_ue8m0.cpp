#include "unpack_ue8m0.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) { m.def(dgmoe::kUnpackUe8m0Schema); }
