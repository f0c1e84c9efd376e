#include "allocate.h"

namespace dgmoe {

void throw_failed_allocation(const std::string& text) { throw std::runtime_error(text); }

}  // namespace dgmoe
