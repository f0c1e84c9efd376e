#include "allocate.h"
#include "cuda.cuh"
#include "out_of_memory.h"

namespace dgmoe {
namespace {

// What PyTorch says of its last error, from 2.13 on.
std::string reason_of_torch() {
  using Get = const char* (*)();
  const auto get =
      reinterpret_cast<Get>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  const char* reason = get == nullptr ? nullptr : get();
  return reason == nullptr || reason[0] == '\0' ? "CUDA out of memory" : reason;
}

}  // namespace

// An allocation also fails where an earlier kernel has broken the context: that is not for lack of
// memory, and every call says so.
void throw_failed_allocation(const std::string& text) {
  size_t free = 0;
  size_t total = 0;
  const cudaError_t error = cudaMemGetInfo(&free, &total);
  if (error != cudaSuccess && error != cudaErrorStreamCaptureUnsupported) {
    throw std::runtime_error(text + ": CUDA error: " + cudaGetErrorString(error));
  }
  throw_out_of_memory(text + ": " + reason_of_torch());
}

}  // namespace dgmoe
