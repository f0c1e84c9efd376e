// How the sanity mode finds the first wrong value on CUDA: kernels report numbers of values, the
// host waits for the least.
#pragma once

#include "allocate.h"
#include "cuda.cuh"
#include "sanity.h"

namespace dgmoe {

class FirstFound {
 public:
  FirstFound(const CudaScope& scope, const Tensor& like)
      : scope_(scope), cell_(empty("sanity check", "cell", {1}, ScalarType::Long, like)) {
    STD_CUDA_CHECK(cudaMemsetAsync(cell(), 0xff, sizeof(int64_t), scope.stream()));
  }

  // Where kernels report by atomicMin.
  unsigned long long* cell() { return static_cast<unsigned long long*>(mutable_data_of(cell_)); }

  // The least number reported, or -1. Waits for the stream.
  int64_t wait() {
    int64_t found = 0;
    STD_CUDA_CHECK(
        cudaMemcpyAsync(&found, cell(), sizeof(found), cudaMemcpyDeviceToHost, scope_.stream()));
    STD_CUDA_CHECK(cudaStreamSynchronize(scope_.stream()));
    return found;
  }

 private:
  const CudaScope& scope_;
  Tensor cell_;
};

// A value of a matrix on the device. Waits for the stream.
inline int64_t fetch(const CudaScope& scope, const IdMatrix& ids, int64_t row, int64_t column) {
  const int64_t offset = row * ids.row_stride + column * ids.column_stride;
  const size_t size = ids.is_int64 ? sizeof(int64_t) : sizeof(int32_t);
  const char* at = static_cast<const char*>(ids.data) + offset * static_cast<int64_t>(size);
  int64_t wide = 0;
  int32_t narrow = 0;
  void* out = ids.is_int64 ? static_cast<void*>(&wide) : static_cast<void*>(&narrow);
  STD_CUDA_CHECK(cudaMemcpyAsync(out, at, size, cudaMemcpyDeviceToHost, scope.stream()));
  STD_CUDA_CHECK(cudaStreamSynchronize(scope.stream()));
  return ids.is_int64 ? wide : narrow;
}

}  // namespace dgmoe
