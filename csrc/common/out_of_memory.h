// The C++ exception that Python sees as torch.OutOfMemoryError. The stable ABI has none: its shims
// answer with error codes, and c10::OutOfMemoryError is no part of it. But PyTorch's bindings hand
// every exception of an op to pybind11, which asks each `pybind11::builtin_exception` to set the
// Python error itself. Exceptions are matched by the name of their type, and that class has had one
// layout since pybind11 2.0; should a later one not know it, this is a std::runtime_error and Python
// sees a RuntimeError of the same text.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <type_traits>

namespace pybind11 {

class builtin_exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual void set_error() const = 0;
};

}  // namespace pybind11

namespace dgmoe {

// Python's C interface, found where the process has one: the libraries link no Python.
struct PythonErrors {
  void* (*import)(const char*);
  void* (*attribute)(void*, const char*);
  void (*set_string)(void*, const char*);
  void (*clear)();
  void** runtime_error;

  static PythonErrors find() {
    PythonErrors found{};
    const auto look_up = [](auto& to, const char* name) {
      to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(dlsym(RTLD_DEFAULT, name));
    };
    look_up(found.import, "PyImport_ImportModule");
    look_up(found.attribute, "PyObject_GetAttrString");
    look_up(found.set_string, "PyErr_SetString");
    look_up(found.clear, "PyErr_Clear");
    look_up(found.runtime_error, "PyExc_RuntimeError");
    return found;
  }
  bool complete() const {
    return import != nullptr && attribute != nullptr && set_string != nullptr && clear != nullptr &&
           runtime_error != nullptr;
  }
};

class OutOfMemory : public pybind11::builtin_exception {
 public:
  OutOfMemory(const std::string& text, const PythonErrors& python)
      : pybind11::builtin_exception(text), python_(python) {}

  // Called by pybind11 with the interpreter's lock held. The two references are kept: the module
  // and its class live as long as the process.
  void set_error() const override {
    void* const torch = python_.import("torch");
    void* error = torch == nullptr ? nullptr : python_.attribute(torch, "OutOfMemoryError");
    if (error == nullptr) {
      python_.clear();
      error = *python_.runtime_error;
    }
    python_.set_string(error, what());
  }

 private:
  PythonErrors python_;
};

[[noreturn]] inline void throw_out_of_memory(const std::string& text) {
  const PythonErrors python = PythonErrors::find();
  if (!python.complete()) throw std::runtime_error(text);
  throw OutOfMemory(text, python);
}

}  // namespace dgmoe
