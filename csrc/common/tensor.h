// What the ops need of tensors beyond the stable C++ wrappers, and the checked way to register a
// kernel. The only file, with cuda.cuh, that touches raw stable-ABI shims.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "layout.h"

namespace dgmoe {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e8m0fnu:
      return "float8_e8m0fnu";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return "another dtype";
  }
}

// Unlike Tensor::scalar_type, this does not throw on dtypes that the 2.10 floor cannot name (e8m0,
// fp4).
inline ScalarType dtype_of(const Tensor& tensor) {
  int32_t code = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return static_cast<ScalarType>(code);
}

// Where a tensor is, or, for a stand-in of contract.h, where the tensor is that it stands for.
// PyTorch keeps no index of meta devices: a stand-in has it as a storage offset, in these steps.
constexpr int64_t kStandInOffset = 16;

struct DeviceId {
  int32_t type;
  int64_t index;
};

inline bool is_meta(const Tensor& tensor) {
  int32_t type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type == aoti_torch_device_type_meta();
}

inline DeviceId device_of(const Tensor& tensor) {
  int32_t type = 0;
  int32_t index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  if (type == aoti_torch_device_type_cpu()) return {type, 0};
  if (type == aoti_torch_device_type_meta()) {
    int64_t offset = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &offset));
    return {type, offset / kStandInOffset};
  }
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &index));
  return {type, index};
}

inline const void* data_of(const Tensor& tensor) { return tensor.const_data_ptr(); }
inline void* mutable_data_of(Tensor& tensor) { return tensor.mutable_data_ptr(); }

// The layout of a given scale tensor (mn, columns) or (batch, mn, columns), whatever its strides.
inline ScaleStrides scale_strides_of(const Tensor& scale, int64_t groups) {
  const int64_t dim = scale.dim();
  const bool packed = dtype_of(scale) == ScalarType::Int;
  const ScaleLayout form = packed                       ? ScaleLayout::kPackedUe8m0
                           : scale.stride(dim - 1) == 1 ? ScaleLayout::kRowMajor
                                                        : ScaleLayout::kMnMajor;
  return {form, groups, dim == 3 ? scale.stride(0) : 0, scale.stride(dim - 2),
          scale.stride(dim - 1)};
}

inline IdMatrix id_matrix(const Tensor& ids) {
  return {data_of(ids), dtype_of(ids) == ScalarType::Long, ids.stride(0), ids.stride(1)};
}

inline WeightMatrix weight_matrix(const Tensor& weights) {
  const ScalarType dtype = dtype_of(weights);
  const WeightKind kind = dtype == ScalarType::Float      ? WeightKind::kFloat
                          : dtype == ScalarType::BFloat16 ? WeightKind::kBf16
                                                          : WeightKind::kHalf;
  return {data_of(weights), kind, weights.stride(0), weights.stride(1)};
}

// The first `rows` rows of a contiguous matrix, as a view.
inline Tensor first_rows(const Tensor& matrix, int64_t rows) {
  const int64_t sizes[2] = {rows, matrix.size(1)};
  const int64_t strides[2] = {matrix.stride(0), matrix.stride(1)};
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(matrix.get(), 2, sizes, strides, 0, &handle));
  return Tensor(handle);
}

// out = a @ b. Into a given tensor: autocast would cast the operands of the plain product.
inline void matmul_into(Tensor& out, const Tensor& a, const Tensor& b) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                    torch::stable::detail::from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // takes the returned reference off the stack
}

// Whether two tensors may share memory: their extents in bytes overlap. Meta tensors have no memory.
inline bool may_overlap(const Tensor& a, const Tensor& b) {
  if (is_meta(a) || is_meta(b)) return false;
  uintptr_t begin[2];
  uintptr_t end[2];
  const Tensor* tensors[2] = {&a, &b};
  for (int i = 0; i < 2; ++i) {
    int64_t last = 0;
    for (int64_t d = 0; d < tensors[i]->dim(); ++d) {
      if (tensors[i]->size(d) == 0) return false;
      last += (tensors[i]->size(d) - 1) * tensors[i]->stride(d);
    }
    begin[i] = reinterpret_cast<uintptr_t>(data_of(*tensors[i]));
    end[i] = begin[i] + (last + 1) * tensors[i]->element_size();
  }
  return begin[0] < end[1] && begin[1] < end[0];
}

// ---- registration ---- TORCH_BOX copies eight bytes an argument and checks nothing: `float` for a
// schema's float reads 0. These assertions let only the types through that the stable ABI carries
// whole.
namespace detail {

template <typename T>
struct IsBoxable : std::false_type {};
template <>
struct IsBoxable<Tensor> : std::true_type {};
template <>
struct IsBoxable<int64_t> : std::true_type {};
template <>
struct IsBoxable<double> : std::true_type {};
template <>
struct IsBoxable<bool> : std::true_type {};
template <typename T>
struct IsBoxable<std::optional<T>> : IsBoxable<T> {};
template <>
struct IsBoxable<std::vector<int64_t>> : std::true_type {};
template <>
struct IsBoxable<std::vector<Tensor>> : std::true_type {};

template <typename T>
struct IsReturnable : std::is_same<T, Tensor> {};
template <>
struct IsReturnable<void> : std::true_type {};
template <>
struct IsReturnable<std::vector<int64_t>> : std::true_type {};
template <typename... Ts>
struct IsReturnable<std::tuple<Ts...>> : std::conjunction<std::is_same<Ts, Tensor>...> {};

template <typename Function>
struct CheckedKernel;
template <typename Return, typename... Args>
struct CheckedKernel<Return(Args...)> {
  static_assert(std::conjunction_v<IsBoxable<std::remove_cv_t<std::remove_reference_t<Args>>>...>,
                "a kernel takes Tensor, int64_t, double, bool, optionals of them, and vectors of "
                "int64_t or Tensor");
  static_assert(IsReturnable<Return>::value,
                "a kernel returns Tensor, a tuple of Tensor, a vector of int64_t, or void");
  static constexpr bool value = true;
};

}  // namespace detail

#define DGMOE_BOX(kernel)                                                              \
  (static_cast<void>(                                                                  \
       dgmoe::detail::CheckedKernel<std::remove_pointer_t<decltype(&kernel)>>::value), \
   TORCH_BOX(&kernel))

}  // namespace dgmoe
