#include "sanity.h"

namespace dgmoe {

std::optional<WrongIndex> first_wrong_index(const IndexRange& range, const Tensor& tensor) {
  if (!tensor.is_cpu()) return std::nullopt;
  for (int64_t row = 0; row < range.rows; ++row) {
    for (int64_t column = 0; column < range.columns; ++column) {
      if (range.legal(row, column)) continue;
      return WrongIndex{row, column, range.values(row, column), range.in_range(row, column)};
    }
  }
  return std::nullopt;
}

}  // namespace dgmoe
