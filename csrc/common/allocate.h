// How ops get memory: tensors and workspaces are asked for by the names of the op and the argument, and
// where there is not enough the error says both, and how many bytes.
#pragma once

#include <new>
#include <vector>

#include "check.h"

namespace dgmoe {

// Throws for tensors on the library's own device. Each library defines it, in allocate_cpu.cpp
// (std::runtime_error) and allocate_cuda.cu (torch.OutOfMemoryError in Python).
[[noreturn]] void throw_failed_allocation(const std::string& text);

inline int64_t checked_product(const char* op, const char* arg, int64_t a, int64_t b) {
  int64_t product = 0;
  if (!__builtin_mul_overflow(a, b, &product)) return product;
  std::ostringstream got;
  got << a << " times " << b;
  Check(op).that(false, arg, "take fewer than 2^63 bytes", got.str());
  return product;
}

inline int64_t element_bytes(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Long:
    case ScalarType::Double:
      return 8;
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    case ScalarType::BFloat16:
    case ScalarType::Half:
    case ScalarType::Short:
      return 2;
    default:
      return 1;
  }
}

inline std::string request_text(const char* op, const char* arg, const std::string& memory,
                                int64_t bytes, const std::string& what) {
  std::ostringstream text;
  text << "dgmoe::" << op << ": " << arg << " must fit into the memory of " << memory << ", got "
       << bytes << " bytes" << what;
  return text.str();
}

// `bytes` only says in an error what was asked for.
inline Tensor empty_strided(const char* op, const char* arg, const Sizes& sizes,
                            const Sizes& strides, ScalarType dtype, const Tensor& like,
                            int64_t bytes) {
  int32_t device_type = 0;
  int32_t device_index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error =
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               static_cast<int32_t>(dtype), device_type, device_index, &handle);
  if (error == AOTI_TORCH_SUCCESS) return Tensor(handle);
  std::string shape;
  for (int64_t size : sizes) shape += (shape.empty() ? " for (" : ", ") + std::to_string(size);
  throw_failed_allocation(
      request_text(op, arg, device_text(like), bytes, shape + ") of " + dtype_name(dtype)));
}

inline Tensor empty(const char* op, const char* arg, const Sizes& sizes, ScalarType dtype,
                    const Tensor& like) {
  Sizes strides(sizes.size(), 1);
  int64_t bytes = element_bytes(dtype);
  for (int64_t d = static_cast<int64_t>(sizes.size()) - 1; d >= 0; --d) {
    strides[d] = bytes / element_bytes(dtype);
    bytes = checked_product(op, arg, bytes, sizes[d] > 0 ? sizes[d] : 1);
  }
  return empty_strided(op, arg, sizes, strides, dtype, like, bytes);
}

// A contiguous copy.
inline Tensor contiguous_copy(const char* op, const char* arg, const Tensor& tensor) {
  const Sizes sizes(tensor.sizes().begin(), tensor.sizes().end());
  Tensor copy = empty(op, arg, sizes, dtype_of(tensor), tensor);
  torch::stable::copy_(copy, tensor);
  return copy;
}

// A workspace of the host.
template <typename T>
std::vector<T> host_workspace(const char* op, const char* arg, int64_t count, T value) {
  try {
    return std::vector<T>(static_cast<size_t>(count), value);
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  throw std::runtime_error(
      request_text(op, arg, "the host", count * static_cast<int64_t>(sizeof(T)), ""));
}

struct ScaleTensor {
  Tensor tensor;
  ScaleStrides strides;
};

// Allocates scales for (batch, mn, groups) in `form`; batch < 0 makes the tensor two-dimensional.
// Uninitialised.
inline ScaleTensor empty_scale(const char* op, const char* arg, int64_t batch, int64_t mn,
                               int64_t groups, ScaleLayout form, const Tensor& like) {
  const bool packed = form == ScaleLayout::kPackedUe8m0;
  const int64_t columns = packed ? ceil_div(groups, kGroupsPerWord) : groups;
  const bool row_major = form == ScaleLayout::kRowMajor;
  const int64_t leading = row_major ? 1 : tma_aligned(mn);
  const int64_t row_stride = row_major ? columns : 1;
  const int64_t column_stride = leading;
  const int64_t batch_stride = checked_product(op, arg, columns, row_major ? mn : leading);
  const int64_t bytes =
      checked_product(op, arg, batch < 0 ? 1 : batch, checked_product(op, arg, batch_stride, 4));
  const ScalarType dtype = packed ? ScalarType::Int : ScalarType::Float;
  const bool batched = batch >= 0;
  Sizes sizes = batched ? Sizes{batch, mn, columns} : Sizes{mn, columns};
  Sizes strides =
      batched ? Sizes{batch_stride, row_stride, column_stride} : Sizes{row_stride, column_stride};
  const ScaleStrides of{form, groups, batched ? batch_stride : 0, row_stride, column_stride};
  if (row_major || leading == mn) {
    return {empty_strided(op, arg, sizes, strides, dtype, like, bytes), of};
  }
  // A strided allocation ends at its last element, but the slack of the last column is written too.
  Tensor whole = empty(op, arg, {batched ? batch : 1, batch_stride}, dtype, like);
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      whole.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0, &handle));
  return {Tensor(handle), of};
}

// The tensor itself, or a contiguous copy where that makes each row contiguous and start on 16
// bytes. Rows whose length is no multiple of 16 bytes stay as they are: kernels take the stride.
inline Tensor with_aligned_rows(const char* op, const char* arg, const Tensor& tensor) {
  const int64_t dim = tensor.dim();
  const int64_t element = static_cast<int64_t>(tensor.element_size());
  const bool dense_rows = tensor.stride(dim - 1) == 1 || tensor.size(dim - 1) <= 1;
  const bool aligned_base = reinterpret_cast<uintptr_t>(data_of(tensor)) % 16 == 0;
  const bool alignable = tensor.size(dim - 1) * element % 16 == 0;
  bool aligned_rows = true;
  for (int64_t d = 0; d < dim - 1; ++d) {
    aligned_rows = aligned_rows && (tensor.stride(d) * element) % 16 == 0;
  }
  if (dense_rows && aligned_base && (aligned_rows || !alignable)) return tensor;
  // Not contiguous(): a contiguous but misaligned view must move too.
  return contiguous_copy(op, arg, tensor);
}

}  // namespace dgmoe
