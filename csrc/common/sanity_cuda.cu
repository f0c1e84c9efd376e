#include "sanity.cuh"

namespace dgmoe {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    first_wrong_index_kernel(IndexRange range, unsigned long long* first) {
  const int64_t count = range.rows * range.columns;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    if (range.legal(i / range.columns, i % range.columns)) continue;
    atomicMin(first, static_cast<unsigned long long>(i));
    return;
  }
}

}  // namespace

std::optional<WrongIndex> first_wrong_index(const IndexRange& range, const Tensor& tensor) {
  const int64_t count = range.rows * range.columns;
  if (!tensor.is_cuda() || count == 0) return std::nullopt;
  const CudaScope scope(tensor);
  if (scope.is_capturing()) return std::nullopt;
  FirstFound first(scope, tensor);
  const unsigned grid = grid_for(ceil_div(count, kThreads), 8);
  DGMOE_LAUNCH(first_wrong_index_kernel, grid, kThreads, 0, scope, range, first.cell());
  const int64_t found = first.wait();
  if (found < 0) return std::nullopt;
  const int64_t row = found / range.columns;
  const int64_t column = found % range.columns;
  const int64_t value = fetch(scope, range.values, row, column);
  return WrongIndex{row, column, value, value >= range.least && value <= range.most};
}

}  // namespace dgmoe
