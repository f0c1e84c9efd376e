// An op's contract as an op of its own, `dgmoe::_check_<op>`: the checks of plan_<op> without a
// kernel, so that the fake kernels of Python refuse what the op refuses, in its words. It takes
// meta tensors: they have dtypes, sizes and strides, and no memory. Their storage offset tells which
// device they stand for (tensor.h).
#pragma once

#include <string>

#include "tensor.h"

namespace dgmoe {

// The schema of `_check_<op>`: the arguments of the op, or of its `.out` with buffers that may be
// None.
inline std::string contract_schema(std::string schema) {
  for (const char* part : {".out", "(a!)", "(b!)"}) {
    const size_t at = schema.find(part);
    if (at == std::string::npos) continue;
    schema.erase(at, std::char_traits<char>::length(part));
    if (part[0] == '(' && schema[at] != '?') schema.insert(at, "?");
  }
  return "_check_" + schema.substr(0, schema.rfind("->")) + "-> ()";
}

template <auto plan>
struct Contract;

template <typename Call, typename... Args, Call (*plan)(Args...)>
struct Contract<plan> {
  static void check(Args... args) { plan(args...); }
};

}  // namespace dgmoe

// `schema` is that of the op, or of its `.out` where it has one: the arguments of plan_<op>.
#define DGMOE_CONTRACT(op, schema)                                              \
  STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) {                                     \
    m.def(dgmoe::contract_schema(dgmoe::schema).c_str());                       \
  }                                                                             \
  STABLE_TORCH_LIBRARY_IMPL(dgmoe, Meta, m) {                                   \
    m.impl("_check_" #op, DGMOE_BOX(dgmoe::Contract<dgmoe::plan_##op>::check)); \
  }
