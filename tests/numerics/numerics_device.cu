// numerics.h as a GPU computes it, over arrays of the host, for the test that holds it to the host.
#include <cuda_runtime.h>

#include "../../csrc/common/numerics.h"

namespace {

constexpr int kFunctions = 4;
constexpr int kCodecs = 5;
constexpr int kCodes = 256;
constexpr int kDecoders = 3;

__global__ void evaluate(const float* x, int count, float* values, unsigned char* codes) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const float functions[kFunctions] = {dgmoe::silu(x[i]), dgmoe::exp_f32(x[i]),
                                         dgmoe::sqrt_softplus(x[i]), dgmoe::tanh_f32(x[i])};
    const unsigned char encoded[kCodecs] = {
        dgmoe::float_to_e4m3(x[i]), dgmoe::float_to_ue8m0(x[i]), dgmoe::exact_ue8m0(x[i]),
        dgmoe::float_to_e2m1(x[i]), dgmoe::e2m1_exponent(dgmoe::float_bits(x[i]) & 0x7fffffffu)};
    for (int f = 0; f < kFunctions; ++f) values[static_cast<size_t>(f) * count + i] = functions[f];
    for (int c = 0; c < kCodecs; ++c) codes[static_cast<size_t>(c) * count + i] = encoded[c];
  }
}

__global__ void decode(unsigned int* bits) {
  const unsigned char code = threadIdx.x;
  bits[code] = dgmoe::float_bits(dgmoe::e4m3_to_float(code));
  bits[kCodes + code] = dgmoe::float_bits(dgmoe::ue8m0_to_float(code));
  bits[2 * kCodes + code] = dgmoe::float_bits(dgmoe::e2m1_to_float(code));
}

// Memory of the device, freed at the end.
class Room {
 public:
  explicit Room(size_t bytes) : failed_(cudaMalloc(&data_, bytes) != cudaSuccess) {}
  ~Room() { cudaFree(data_); }
  bool failed() const { return failed_ || cudaGetLastError() != cudaSuccess; }
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  bool failed_;
};

}  // namespace

// values (4, count): silu, exp_f32, sqrt_softplus, tanh_f32. codes (5, count): float_to_e4m3,
// float_to_ue8m0, exact_ue8m0, float_to_e2m1, e2m1_exponent of the magnitude.
extern "C" int evaluate_on_device(const float* x, int count, float* values, unsigned char* codes) {
  const size_t n = count;
  const Room room(n * (4 * (1 + kFunctions) + kCodecs));
  if (room.failed()) return 1;
  float* in = reinterpret_cast<float*>(room.data());
  float* out = in + n;
  unsigned char* bytes = reinterpret_cast<unsigned char*>(out + kFunctions * n);
  cudaMemcpy(in, x, n * 4, cudaMemcpyHostToDevice);
  evaluate<<<256, 256>>>(in, count, out, bytes);
  cudaMemcpy(values, out, kFunctions * n * 4, cudaMemcpyDeviceToHost);
  cudaMemcpy(codes, bytes, kCodecs * n, cudaMemcpyDeviceToHost);
  return room.failed() ? 2 : 0;
}

// bits (3, 256) of every byte: e4m3_to_float, ue8m0_to_float, e2m1_to_float.
extern "C" int decode_on_device(unsigned int* bits) {
  const Room room(kDecoders * kCodes * 4);
  if (room.failed()) return 1;
  decode<<<1, kCodes>>>(reinterpret_cast<unsigned int*>(room.data()));
  cudaMemcpy(bits, room.data(), kDecoders * kCodes * 4, cudaMemcpyDeviceToHost);
  return room.failed() ? 2 : 0;
}
