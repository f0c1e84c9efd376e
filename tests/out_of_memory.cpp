// An op that runs out of memory, for what Python sees of that: no GPU is needed.
#include "../csrc/common/out_of_memory.h"

#include "../csrc/common/tensor.h"

namespace {

dgmoe::Tensor out_of_memory(const dgmoe::Tensor&) { dgmoe::throw_out_of_memory("no room"); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe_test, m) { m.def("out_of_memory(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(dgmoe_test, CPU, m) { m.impl("out_of_memory", DGMOE_BOX(out_of_memory)); }
