// numerics.h as a GPU computes it, over arrays of the host, for the test that holds it to the host.
#include <cuda_runtime.h>

#include "../../csrc/common/numerics.h"

namespace {

__global__ void evaluate(const float* x, int count, float* silu, float* exponential,
                         float* softplus, float* hyperbolic, unsigned char* code,
                         unsigned char* exponent) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    silu[i] = dgmoe::silu(x[i]);
    exponential[i] = dgmoe::exp_f32(x[i]);
    softplus[i] = dgmoe::sqrt_softplus(x[i]);
    hyperbolic[i] = dgmoe::tanh_f32(x[i]);
    code[i] = dgmoe::float_to_e4m3(x[i]);
    exponent[i] = dgmoe::float_to_ue8m0(x[i]);
  }
}

}  // namespace

extern "C" int evaluate_on_device(const float* x, int count, float* silu, float* exponential,
                                  float* softplus, float* hyperbolic, unsigned char* code,
                                  unsigned char* exponent) {
  char* room = nullptr;
  const size_t n = count;
  if (cudaMalloc(&room, n * 22) != cudaSuccess) return 1;
  float* values = reinterpret_cast<float*>(room);
  cudaMemcpy(values, x, n * 4, cudaMemcpyHostToDevice);
  unsigned char* bytes = reinterpret_cast<unsigned char*>(values + 5 * n);
  evaluate<<<256, 256>>>(values, count, values + n, values + 2 * n, values + 3 * n, values + 4 * n,
                         bytes, bytes + n);
  cudaMemcpy(silu, values + n, n * 4, cudaMemcpyDeviceToHost);
  cudaMemcpy(exponential, values + 2 * n, n * 4, cudaMemcpyDeviceToHost);
  cudaMemcpy(softplus, values + 3 * n, n * 4, cudaMemcpyDeviceToHost);
  cudaMemcpy(hyperbolic, values + 4 * n, n * 4, cudaMemcpyDeviceToHost);
  cudaMemcpy(code, bytes, n, cudaMemcpyDeviceToHost);
  cudaMemcpy(exponent, bytes + n, n, cudaMemcpyDeviceToHost);
  cudaFree(room);
  return cudaGetLastError() == cudaSuccess ? 0 : 2;
}
