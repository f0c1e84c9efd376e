// Where an op writes: a buffer that the caller gave, checked, or a fresh one.
#pragma once

#include <vector>

#include "allocate.h"

namespace dgmoe {

struct NamedTensor {
  const char* arg;
  const Tensor& tensor;
};

// `others` are all tensors of the call, none of which the buffer may share memory with; the first
// names its device.
inline Tensor given_or_empty(const Check& check, const char* arg,
                             const std::optional<Tensor>& given, const Sizes& sizes,
                             ScalarType dtype, const std::vector<NamedTensor>& others) {
  const NamedTensor& first = others.front();
  if (!given.has_value()) return empty(check.op(), arg, sizes, dtype, first.tensor);
  check.dtype(arg, *given, {dtype});
  bool same = given->dim() == static_cast<int64_t>(sizes.size());
  std::string must = "have shape (";
  for (size_t d = 0; d < sizes.size(); ++d) {
    same = same && given->size(static_cast<int64_t>(d)) == sizes[d];
    must += (d > 0 ? ", " : "") + std::to_string(sizes[d]);
  }
  if (!same) check.that(false, arg, must + ")", shape_text(*given));
  check.same_device(arg, *given, first.arg, first.tensor);
  check.contiguous(arg, *given);
  check.that(reinterpret_cast<uintptr_t>(data_of(*given)) % 16 == 0, arg, "start on 16 bytes",
             "another address");
  for (const NamedTensor& other : others) {
    if (!may_overlap(*given, other.tensor)) continue;
    check.that(false, arg, std::string("share no memory with ") + other.arg, "a tensor that does");
  }
  return *given;
}

}  // namespace dgmoe
