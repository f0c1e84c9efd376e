#include "deep_gemm.cuh"

#include "../../common/out_of_memory.h"

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <unordered_set>

#include "../scopes.cuh"

namespace dgmoe {
namespace {

// ---- the C interface of apache-tvm-ffi, by its documented layout ----

struct FfiAny {
  int32_t type;
  uint32_t padding;
  union {
    int64_t integer;
    void* pointer;
    const char* text;
  };
};

enum FfiType : int32_t { kNone = 0, kInt = 1, kBool = 2, kDlTensor = 7, kRawText = 8 };

struct DlTensor {
  void* data;
  int32_t device_type, device_index;
  int32_t dim;
  uint8_t dtype_code, dtype_bits;
  uint16_t dtype_lanes;
  const int64_t* sizes;
  const int64_t* strides;
  uint64_t byte_offset;
};

using FfiFunction = int (*)(void* self, const FfiAny* args, int32_t count, FfiAny* result);
using FfiTakeError = void (*)(void** error);
using FfiRelease = int (*)(void* object);

constexpr int32_t kDlCuda = 2;

// In the order of Argument in dgmoe_ops/backends/deep_gemm/native.py.
enum class Argument : int64_t {
  kA,
  kAScale,
  kB,
  kBScale,
  kD,
  kInfo,
  kExpectedM,
  kSqrSum,
  kNumSplits,
  kNone,
  kFalse,
  kTrue,
  kEmptyText,
  kNkText,
};
constexpr int kArgumentKinds = 14;
constexpr int kMostArguments = 24;

struct Native {
  FfiFunction function = nullptr;
  FfiTakeError take_error = nullptr;
  FfiRelease release = nullptr;
  int32_t count = 0;
  std::array<Argument, kMostArguments> arguments{};
  std::optional<ScaleLayout> a_scale;  // none for bf16
  std::optional<ScaleLayout> b_scale;
};

// ---- what this process has done so far ----

// What the library's choice of a kernel depends on, and more.
using Shape = std::array<int64_t, 11>;

struct ShapeHash {
  size_t operator()(const Shape& shape) const {
    uint64_t hash = 0x9e3779b97f4a7c15u;
    for (int64_t x : shape) {
      hash = (hash ^ static_cast<uint64_t>(x)) * 0xff51afd7ed558ccdu;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

struct State {
  std::shared_mutex mutex;                    // of `warm` and `native`
  std::unordered_set<Shape, ShapeHash> warm;  // ran outside a capture: compiled and loaded
  std::array<Native, kDeepGemmOps> native;
  std::atomic<int64_t> scopes{0};  // threads' scopes with settings of their own
  std::atomic<int64_t> direct{0};  // direct calls in flight
};

State& state() {
  static State* const instance = new State;  // never destroyed: calls may outlive main
  return *instance;
}

// What of the thread's settings a kernel of the library is chosen by. The alignment of segments
// concerns no other GEMM.
int64_t settings_of(const DeepGemmCall& call) {
  const GemmSettings& s = gemm_settings();
  const bool contig = call.spec.layout == GemmLayout::kContig;
  return ((contig ? s.alignment : 0) * 4 + s.pdl + 1) * (int64_t{1} << 32) + s.num_sms;
}

Shape shape_of(const DeepGemmCall& call) {
  const GroupedGemmSpec& spec = call.spec;
  return {static_cast<int64_t>(call.op),
          call.a->get_device_index(),
          settings_of(call),
          spec.experts,
          spec.m,
          spec.n,
          spec.k,
          spec.expected_m,
          spec.a_gran_k,
          spec.b_gran_mn * 1024 + spec.b_gran_k + (spec.b_fp4 ? 1 << 20 : 0),
          call.num_splits};
}

// ---- the direct call ----

bool has_layout(const Tensor* scale, std::optional<ScaleLayout> layout) {
  if (scale == nullptr || !layout.has_value()) return scale == nullptr && !layout.has_value();
  const bool packed = *layout == ScaleLayout::kPackedUe8m0;
  if (dtype_of(*scale) != (packed ? ScalarType::Int : ScalarType::Float)) return false;
  if (*layout == ScaleLayout::kRowMajor) return scale->is_contiguous();
  const int64_t dim = scale->dim();
  const int64_t leading = tma_aligned(scale->size(dim - 2));
  return scale->stride(dim - 1) == leading &&
         (scale->stride(dim - 2) == 1 || scale->size(dim - 2) == 1) &&
         (dim == 2 || scale->stride(0) == leading * scale->size(dim - 1));
}

bool on_16_bytes(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(data_of(tensor)) % 16 == 0;
}

DlTensor view(const Tensor& tensor) {
  DlTensor out{};
  out.data = const_cast<void*>(data_of(tensor));
  out.device_type = kDlCuda;
  out.device_index = tensor.get_device_index();
  out.dim = static_cast<int32_t>(tensor.dim());
  out.dtype_lanes = 1;
  out.dtype_bits = static_cast<uint8_t>(tensor.element_size() * 8);
  switch (dtype_of(tensor)) {
    case ScalarType::Int:
    case ScalarType::Char:  // two e2m1 codes
      out.dtype_code = 0;
      break;
    case ScalarType::BFloat16:
      out.dtype_code = 4;
      break;
    case ScalarType::Float8_e4m3fn:
      out.dtype_code = 10;
      break;
    default:
      out.dtype_code = 2;  // float32
  }
  out.sizes = tensor.sizes().data();
  out.strides = tensor.strides().data();
  return out;
}

// Whether the library took the call; its error is dropped, the call through Python shows it again.
bool call_directly(const Native& native, const DeepGemmCall& call) {
  const Tensor* tensors[] = {call.a, call.a_scale, call.b,      call.b_scale,
                             call.d, call.info,    call.sqr_sum};
  const Argument places[] = {Argument::kA, Argument::kAScale, Argument::kB,     Argument::kBScale,
                             Argument::kD, Argument::kInfo,   Argument::kSqrSum};
  DlTensor views[kArgumentKinds] = {};
  for (int i = 0; i < 7; ++i) {
    if (tensors[i] != nullptr) views[static_cast<int>(places[i])] = view(*tensors[i]);
  }
  FfiAny args[kMostArguments] = {};
  for (int32_t i = 0; i < native.count; ++i) {
    const Argument argument = native.arguments[i];
    switch (argument) {
      case Argument::kExpectedM:
        args[i].type = kInt;
        args[i].integer = call.spec.expected_m;
        break;
      case Argument::kNumSplits:
        args[i].type = call.num_splits > 0 ? kInt : kNone;
        args[i].integer = call.num_splits;
        break;
      case Argument::kNone:
        args[i].type = kNone;
        break;
      case Argument::kFalse:
      case Argument::kTrue:
        args[i].type = kBool;
        args[i].integer = argument == Argument::kTrue;
        break;
      case Argument::kEmptyText:
      case Argument::kNkText:
        args[i].type = kRawText;
        args[i].text = argument == Argument::kNkText ? "nk" : "";
        break;
      default:
        args[i].type = kDlTensor;
        args[i].pointer = &views[static_cast<int>(argument)];
    }
  }
  FfiAny result{};
  if (native.function(nullptr, args, native.count, &result) == 0) return true;
  void* error = nullptr;
  native.take_error(&error);
  if (error != nullptr) native.release(error);
  return false;
}

// Counts a direct call while it is in flight, also where it ends by an exception: a scope waits for
// the count to be 0.
struct InFlight {
  std::atomic<int64_t>& count;
  explicit InFlight(std::atomic<int64_t>& of) : count(of) { count.fetch_add(1); }
  ~InFlight() { count.fetch_sub(1); }
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;
};

// Tries the direct call of a shape that has run before.
bool try_directly(const Native& native, const DeepGemmCall& call) {
  if (native.function == nullptr || call.spec.a_gran_k > 0) return false;
  if (!has_layout(call.a_scale, native.a_scale) || !has_layout(call.b_scale, native.b_scale)) {
    return false;
  }
  if (!on_16_bytes(*call.a) || !on_16_bytes(*call.b) || !on_16_bytes(*call.d)) return false;
  // A scope that opens waits for the calls in flight, and later ones see it: a thread's settings
  // are then set only while nobody else is inside the library.
  State& here = state();
  const InFlight counted(here.direct);
  return here.scopes.load() == 0 && call_directly(native, call);
}

// ---- the call through Python ----

void call_python(const DeepGemmCall& call) {
  const auto optional = [](const Tensor* tensor) {
    return tensor == nullptr ? std::optional<Tensor>() : std::optional<Tensor>(*tensor);
  };
  using torch::stable::detail::from;
  std::array<StableIValue, 13> stack{from(static_cast<int64_t>(call.op)),
                                     from(*call.a),
                                     from(optional(call.a_scale)),
                                     from(*call.b),
                                     from(optional(call.b_scale)),
                                     from(optional(call.info)),
                                     from(call.spec.expected_m),
                                     from(call.spec.a_gran_k),
                                     from(call.spec.b_gran_mn),
                                     from(call.spec.b_gran_k),
                                     from(call.num_splits),
                                     from(*call.d),
                                     from(optional(call.sqr_sum))};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("dgmoe::_gemm_run", "", stack.data(), TORCH_ABI_VERSION));
  const Tensor report = torch::stable::detail::to<Tensor>(stack[0]);
  const int64_t size = report.size(0);
  if (size == 0) return;
  const char* bytes = static_cast<const char*>(data_of(report));
  const std::string text(bytes + 1, bytes + size);
  if (bytes[0] == 'V') throw std::invalid_argument(text);
  if (bytes[0] == 'M') {
    throw_out_of_memory(
        "dgmoe::" + std::string(call.name) +
        ": the workspace of its library must fit into the memory of the device: " + text);
  }
  throw std::runtime_error(text);
}

[[noreturn]] void refuse_cold_capture(const DeepGemmCall& call) {
  std::ostringstream text;
  text << "dgmoe::" << call.name
       << ": this shape must have run before a stream captures it, got m=" << call.spec.m
       << ", n=" << call.spec.n << ", k=" << call.spec.k << ", experts=" << call.spec.experts;
  if (call.spec.expected_m > 0) text << ", expected_m=" << call.spec.expected_m;
  text << " for the first time: its kernel would be compiled or loaded inside the graph; call"
          " dgmoe_ops.warmup(weights, tokens=...) or the layer itself once before the capture";
  throw std::runtime_error(text.str());
}

void bind(int64_t op, int64_t function, int64_t take_error, int64_t release,
          std::vector<int64_t> arguments, int64_t a_scale, int64_t b_scale) {
  const Check check("_deep_gemm_bind");
  check.that(op >= 0 && op < kDeepGemmOps, "op", "be an op", op);
  check.that(arguments.size() <= kMostArguments, "arguments", "be fewer", arguments.size());
  Native native;
  native.function = reinterpret_cast<FfiFunction>(function);
  native.take_error = reinterpret_cast<FfiTakeError>(take_error);
  native.release = reinterpret_cast<FfiRelease>(release);
  native.count = static_cast<int32_t>(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    check.that(arguments[i] >= 0 && arguments[i] < kArgumentKinds, "arguments", "be known",
               arguments[i]);
    native.arguments[i] = static_cast<Argument>(arguments[i]);
  }
  if (a_scale >= 0) native.a_scale = check.scale_layout(a_scale);
  if (b_scale >= 0) native.b_scale = check.scale_layout(b_scale);
  std::unique_lock lock(state().mutex);
  state().native[op] = native;
}

void enter_scope(int64_t entered, int64_t alignment, int64_t num_sms, int64_t pdl, bool overlap) {
  gemm_settings() = {alignment, num_sms, pdl, overlap};
  state().scopes.fetch_add(entered);
  while (entered > 0 && state().direct.load() != 0) std::this_thread::yield();
}

}  // namespace

void deep_gemm(const CudaScope& scope, const DeepGemmCall& call) {
  // The library refuses empty operands. Contiguous rows without experts are padding, all of them.
  if (call.spec.m == 0 || call.spec.n == 0 || call.spec.experts == 0) return;
  if (call.spec.k == 0) {
    Tensor* outputs[] = {call.d, call.sqr_sum};
    for (Tensor* output : outputs) {
      if (output == nullptr) continue;
      STD_CUDA_CHECK(cudaMemsetAsync(mutable_data_of(*output), 0,
                                     output->numel() * output->element_size(), scope.stream()));
    }
    return;
  }
  State& here = state();
  const Shape shape = shape_of(call);
  bool warm = false;
  Native native;
  {
    std::shared_lock lock(here.mutex);
    warm = here.warm.count(shape) != 0;
    if (warm) native = here.native[static_cast<int>(call.op)];
  }
  if (warm && !sanity_check() && try_directly(native, call)) return;
  if (!warm && scope.is_capturing()) refuse_cold_capture(call);
  call_python(call);
  if (!warm) {
    std::unique_lock lock(here.mutex);
    here.warm.insert(shape);
  }
}

}  // namespace dgmoe

STABLE_TORCH_LIBRARY_FRAGMENT(dgmoe, m) {
  m.def(
      "_deep_gemm_bind(int op, int function, int take_error, int release, int[] arguments, int"
      " a_scale, int b_scale) -> ()");
  m.def("_gemm_scope(int entered, int alignment, int num_sms, int pdl, bool overlap) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(dgmoe, CompositeExplicitAutograd, m) {
  m.impl("_deep_gemm_bind", DGMOE_BOX(dgmoe::bind));
  m.impl("_gemm_scope", DGMOE_BOX(dgmoe::enter_scope));
}
