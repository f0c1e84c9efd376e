// The check vocabulary. Every message reads `dgmoe::<op>: <arg> must ..., got <value>`; every check
// runs before the op allocates or launches anything. Failures are std::invalid_argument, which
// Python sees as ValueError.
#pragma once

#include <cfloat>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "sanity.h"

namespace dgmoe {

inline std::string shape_text(const Tensor& tensor) {
  std::ostringstream out;
  out << '(';
  for (int64_t d = 0; d < tensor.dim(); ++d) out << (d ? ", " : "") << tensor.size(d);
  out << ')';
  return out.str();
}

inline std::string device_text(const Tensor& tensor) {
  const DeviceId device = device_of(tensor);
  if (device.type == aoti_torch_device_type_cpu()) return "cpu";
  const char* name = device.type == aoti_torch_device_type_cuda()   ? "cuda:"
                     : device.type == aoti_torch_device_type_meta() ? "meta:"
                                                                    : "device:";
  return name + std::to_string(device.index);
}

// Expert ids are below this; any of them may be another rank's.
constexpr int64_t kEveryId = int64_t{INT32_MAX} + 1;

class Check {
 public:
  explicit Check(const char* op) : op_(op), sanity_(sanity_check()) {}

  const char* op() const { return op_; }

  // The general form; `must` completes "<arg> must ...".
  template <typename Got>
  void that(bool holds, const char* arg, const std::string& must, const Got& got) const {
    if (holds) return;
    std::ostringstream message;
    message << "dgmoe::" << op_ << ": " << arg << " must " << must << ", got " << got;
    throw std::invalid_argument(message.str());
  }

  void dtype(const char* arg, const Tensor& tensor,
             std::initializer_list<ScalarType> allowed) const {
    const ScalarType got = dtype_of(tensor);
    std::string names;
    for (ScalarType dtype : allowed) {
      if (dtype == got) return;
      names += (names.empty() ? "" : " or ") + std::string(dtype_name(dtype));
    }
    that(false, arg, "be " + names, dtype_name(got));
  }

  void dim(const char* arg, const Tensor& tensor, int64_t dim, const char* shape) const {
    if (tensor.dim() == dim) return;
    that(false, arg, std::string("have shape ") + shape, shape_text(tensor));
  }

  void size(const char* arg, const Tensor& tensor, int64_t d, int64_t expected,
            const char* why) const {
    if (tensor.size(d) == expected) return;
    that(false, arg,
         "have size " + std::to_string(expected) + " in dimension " + std::to_string(d) + " (" +
             why + ")",
         shape_text(tensor));
  }

  void at_least(const char* arg, int64_t value, int64_t least) const {
    if (value >= least) return;
    that(false, arg, "be at least " + std::to_string(least), value);
  }

  // Sizes and counts: bounded above too, so that no product of two of them wraps.
  void count(const char* arg, int64_t value) const {
    that(value >= 0 && value <= INT32_MAX, arg, "be at least 0 and below 2^31", value);
  }

  // A schema's float is a double and kernels compute in fp32: refuses NaN and what would become
  // infinite, subnormal or 0 on the way.
  float float32(const char* arg, double value) const {
    const double magnitude = std::fabs(value);
    that(magnitude <= FLT_MAX && (magnitude >= FLT_MIN || value == 0), arg,
         "be finite as float32, and 0 or at least 1.18e-38 in magnitude", value);
    return static_cast<float>(value);
  }
  float positive_float32(const char* arg, double value) const {
    that(value >= FLT_MIN && value <= FLT_MAX, arg,
         "be positive and finite as float32, at least 1.18e-38", value);
    return static_cast<float>(value);
  }

  void contiguous(const char* arg, const Tensor& tensor) const {
    if (tensor.is_contiguous()) return;
    std::ostringstream strides;
    for (int64_t d = 0; d < tensor.dim(); ++d)
      strides << (d ? ", " : "strides (") << tensor.stride(d);
    that(false, arg, "be contiguous", strides.str() + ") for shape " + shape_text(tensor));
  }

  void same_device(const char* arg, const Tensor& tensor, const char* reference_arg,
                   const Tensor& reference) const {
    const DeviceId device = device_of(tensor);
    const DeviceId wanted = device_of(reference);
    if (device.type == wanted.type && device.index == wanted.index) return;
    that(false, arg,
         std::string("be on the device of ") + reference_arg + " (" + device_text(reference) + ")",
         device_text(tensor));
  }

  void ids(const char* arg, const Tensor& tensor, const char* reference_arg,
           const Tensor& reference) const {
    dtype(arg, tensor, {ScalarType::Int, ScalarType::Long});
    dim(arg, tensor, 2, "(tokens, top_k)");
    same_device(arg, tensor, reference_arg, reference);
  }

  // The same of expert ids over all ranks.
  void expert_ids(const char* arg, const Tensor& tensor, const char* reference_arg,
                  const Tensor& reference) const {
    ids(arg, tensor, reference_arg, reference);
    indices(arg, tensor, "expert ids", kEveryId);
  }

  ScaleLayout scale_layout(int64_t value) const {
    that(value >= 0 && value <= 2, "scale_layout",
         "be 0 (fp32 row-major), 1 (fp32 MN-major) or 2 (packed UE8M0)", value);
    return static_cast<ScaleLayout>(value);
  }

  int64_t group_size(int64_t value) const {
    that(value == 32 || value == 128, "group_size", "be 32 or 128", value);
    return value;
  }

  // Rows to which segments are padded: whole TMA steps, and bounded, so that no row count can wrap.
  void alignment(int64_t value) const {
    that(value > 0 && value % kTmaElements == 0 && value <= INT32_MAX, "alignment",
         "be a positive multiple of 4 below 2^31", value);
  }

  // The padded width of `k` columns: `padded` where given, else k.
  int64_t padded(const char* arg, std::optional<int64_t> padded, int64_t k) const {
    if (!padded.has_value()) return k;
    count(arg, *padded);
    that(*padded >= k, arg, "be at least the number of columns, " + std::to_string(k), *padded);
    return *padded;
  }

  // A scale tensor for (mn, k) values: fp32 (mn, groups) or int32 (mn, ceil(groups / 4)), any
  // strides.
  void scale(const char* arg, const Tensor& tensor, int64_t dims, int64_t mn, int64_t groups,
             const char* why) const {
    dtype(arg, tensor, {ScalarType::Float, ScalarType::Int});
    const bool packed = dtype_of(tensor) == ScalarType::Int;
    const int64_t columns = packed ? ceil_div(groups, kGroupsPerWord) : groups;
    if (tensor.dim() == dims && tensor.size(dims - 2) == mn && tensor.size(dims - 1) == columns)
      return;
    std::ostringstream must;
    must << "have shape (" << (dims == 3 ? "experts, " : "") << mn << ", " << columns << ") as "
         << (packed ? "packed UE8M0 int32" : "float32") << " scales of " << why;
    that(false, arg, must.str(), shape_text(tensor));
  }

  // ---- in the sanity mode, contents of index tensors; the first wrong value is named ----

  // Each value is one of `count` things, or -1. With `block`, in every block of so many rows those
  // that have one stand before those that have none.
  void indices(const char* arg, const Tensor& tensor, const char* things, int64_t count,
               int64_t block = 0) const {
    if (!sanity_) return;
    const auto wrong = first_wrong_index(index_range(tensor, -1, count - 1, block), tensor);
    if (!wrong.has_value()) return;
    const std::string thing = std::string("hold ") + things;
    if (wrong->in_range) {
      that(false, arg,
           thing + " in front of the padding in each block of " + std::to_string(block) + " rows",
           index_text(tensor, *wrong) + " after -1");
    }
    that(false, arg, thing + " below " + std::to_string(count) + ", or -1",
         index_text(tensor, *wrong));
  }

  // Each value is a number of things, from 0 to `most`.
  void counts(const char* arg, const Tensor& tensor, const char* things, int64_t most) const {
    if (!sanity_) return;
    const auto wrong = first_wrong_index(index_range(tensor, 0, most, 0), tensor);
    if (!wrong.has_value()) return;
    that(false, arg, "hold between 0 and " + std::to_string(most) + " " + things,
         index_text(tensor, *wrong));
  }

  // Each value is below `end`; any negative one is none.
  void below(const char* arg, const Tensor& tensor, const char* things, int64_t end) const {
    if (!sanity_) return;
    const auto wrong = first_wrong_index(index_range(tensor, INT64_MIN, end - 1, 0), tensor);
    if (!wrong.has_value()) return;
    that(false, arg, std::string("hold ") + things + " below " + std::to_string(end),
         index_text(tensor, *wrong));
  }

 private:
  const char* op_;
  bool sanity_;  // DGMOE_SANITY_CHECK, which makes ops look at the contents of index tensors
};

}  // namespace dgmoe
