// What CUDA kernels share: the device and stream of a tensor, checked launches, 16-byte accesses.
#pragma once

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "sanity.h"
#include "sm90.cuh"
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

  bool is_capturing() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    STD_CUDA_CHECK(cudaStreamIsCapturing(stream_, &status));
    return status != cudaStreamCaptureStatusNone;
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// Streaming multiprocessors of the current device; queried once a device.
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

// Eight consecutive bf16 at a 16-byte address, widened.
__device__ __forceinline__ void load8(const uint16_t* in, float (&out)[8]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(in);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = bits_float(words[i] << 16);
    out[2 * i + 1] = bits_float(words[i] & 0xffff0000u);
  }
}

// Eight consecutive floats at a 16-byte address.
__device__ __forceinline__ void load8(const float* in, float (&out)[8]) {
  const float4 low = reinterpret_cast<const float4*>(in)[0];
  const float4 high = reinterpret_cast<const float4*>(in)[1];
  out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
  out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}

// The same where the address fits no vector or fewer than eight are left; the rest reads as zero.
__device__ __forceinline__ void load_some(const uint16_t* in, int64_t count, float (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = i < count ? bf16_to_float(in[i]) : 0.0f;
}
__device__ __forceinline__ void load_some(const float* in, int64_t count, float (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = i < count ? in[i] : 0.0f;
}

// Rounds eight floats to bf16 and stores them at a 16-byte address.
__device__ __forceinline__ void store8_bf16(uint16_t* out, const float (&x)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = float_to_bf16(x[2 * i]) | static_cast<uint32_t>(float_to_bf16(x[2 * i + 1])) << 16;
  }
  *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ void store_some_bf16(uint16_t* out, int64_t count, const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) out[i] = float_to_bf16(x[i]);
  }
}

// float_to_e4m3 of two values in one instruction, the same bits as long as a NaN is not negative: a
// NaN that arithmetic made never is. `low` becomes the first byte in memory.
__device__ __forceinline__ uint32_t e4m3x2(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Quantises eight values and stores their bytes at an 8-byte address.
__device__ __forceinline__ void store8_e4m3(uint8_t* out, const float (&x)[8], float multiplier) {
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    words[i] = e4m3x2(x[4 * i] * multiplier, x[4 * i + 1] * multiplier) |
               e4m3x2(x[4 * i + 2] * multiplier, x[4 * i + 3] * multiplier) << 16;
  }
  *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
}
__device__ __forceinline__ void store_some_e4m3(uint8_t* out, int64_t count, const float (&x)[8],
                                                float multiplier) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) out[i] = static_cast<uint8_t>(e4m3x2(x[i] * multiplier, 0.0f));
  }
}

// The larger magnitude; NaN where one of them is.
__device__ __forceinline__ float max_magnitude(float a, float b) {
  float largest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(fabsf(a)), "f"(fabsf(b)));
  return largest;
}

// The largest magnitude of eight values, as bits: NaN above inf above every number.
__device__ __forceinline__ uint32_t amax8_bits(const float (&x)[8]) {
  const float low = max_magnitude(max_magnitude(x[0], x[1]), max_magnitude(x[2], x[3]));
  const float high = max_magnitude(max_magnitude(x[4], x[5]), max_magnitude(x[6], x[7]));
  return float_bits(max_magnitude(low, high)) & 0x7fffffffu;
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
