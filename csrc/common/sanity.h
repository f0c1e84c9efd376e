// What DGMOE_SANITY_CHECK looks at: whether the values of an index tensor are in their range. Only
// tensors with contents of the library's own device are looked at, so none on meta, and none while
// a stream is captured.
#pragma once

#include <optional>

#include "env.h"
#include "tensor.h"

namespace dgmoe {

inline bool sanity_check() { return env_flag("DGMOE_SANITY_CHECK"); }

struct IndexRange {
  IdMatrix values;
  int64_t rows, columns;
  int64_t least, most;  // both legal
  int64_t block;        // rows of a block within which indices stand before -1; 0: anywhere

  DGMOE_HD bool in_range(int64_t row, int64_t column) const {
    const int64_t value = values(row, column);
    return value >= least && value <= most;
  }
  DGMOE_HD bool legal(int64_t row, int64_t column) const {
    if (!in_range(row, column)) return false;
    const bool follows = block > 0 && row % block != 0 && values(row, column) >= 0;
    return !follows || values(row - 1, column) >= 0;
  }
};

struct WrongIndex {
  int64_t row, column, value;
  bool in_range;  // but after padding
};

// The first value in row-major order that is not legal. Each library defines it for its device, in
// sanity_cpu.cpp and sanity_cuda.cu; on CUDA it waits for the stream.
std::optional<WrongIndex> first_wrong_index(const IndexRange& range, const Tensor& tensor);

// The values of a tensor of up to two dimensions, or of one element.
inline IndexRange index_range(const Tensor& tensor, int64_t least, int64_t most, int64_t block) {
  const bool is_int64 = dtype_of(tensor) == ScalarType::Long;
  const int64_t dim = tensor.numel() == 1 ? 0 : tensor.dim();
  const IdMatrix values{data_of(tensor), is_int64, dim > 0 ? tensor.stride(0) : 0,
                        dim > 1 ? tensor.stride(1) : 0};
  return {values, dim > 0 ? tensor.size(0) : 1, dim > 1 ? tensor.size(1) : 1, least, most, block};
}

// "7 at [3, 1]".
inline std::string index_text(const Tensor& tensor, const WrongIndex& wrong) {
  std::string text = std::to_string(wrong.value);
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    const int64_t at = d == 0 ? wrong.row : d == 1 ? wrong.column : 0;
    text += (d == 0 ? " at [" : ", ") + std::to_string(at);
  }
  return text + (tensor.dim() > 0 ? "]" : "");
}

}  // namespace dgmoe
