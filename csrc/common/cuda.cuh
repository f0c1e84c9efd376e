// What CUDA kernels share: the device and stream of a tensor, checked launches, 16-byte accesses.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "tensor.h"

namespace dgmoe {

// Makes the tensor's device current for this scope and finds the stream that PyTorch uses there.
class CudaScope {
 public:
  explicit CudaScope(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// Streaming multiprocessors of the current device; asked once a device.
inline int multiprocessors() {
  constexpr int kMaxDevices = 64;
  static int counts[kMaxDevices] = {};
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  if (device >= kMaxDevices || counts[device] == 0) {
    int count = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    if (device >= kMaxDevices) return count;
    counts[device] = count;  // racing threads write the same value
  }
  return counts[device];
}

// Blocks for a grid-stride loop over `items`, at most `per_sm` a multiprocessor. Zero items launch
// nothing.
inline unsigned grid_for(int64_t items, int64_t per_sm) {
  const int64_t most = static_cast<int64_t>(multiprocessors()) * per_sm;
  return static_cast<unsigned>(items < most ? items : most);
}

}  // namespace dgmoe

// Launches nothing for an empty grid, which CUDA refuses.
#define DGMOE_LAUNCH(kernel, grid, block, shared, scope, ...)               \
  do {                                                                      \
    if ((grid) > 0) {                                                       \
      kernel<<<(grid), (block), (shared), (scope).stream()>>>(__VA_ARGS__); \
      STD_CUDA_KERNEL_LAUNCH_CHECK();                                       \
    }                                                                       \
  } while (0)
