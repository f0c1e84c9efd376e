// The scalar codecs of numerics.h and the index arithmetic of layout.h, bound for numpy.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "layout.h"

namespace py = pybind11;

namespace {

using dgmoe::bits_float;
using dgmoe::float_bits;

// Floats cross as their bits: a NaN's payload survives no cast.
uint32_t bf16_to_float(uint16_t x) { return float_bits(dgmoe::bf16_to_float(x)); }
uint16_t float_to_bf16(uint32_t bits) { return dgmoe::float_to_bf16(bits_float(bits)); }
uint32_t half_to_float(uint16_t x) { return float_bits(dgmoe::half_to_float(x)); }
uint8_t float_to_e4m3(uint32_t bits) { return dgmoe::float_to_e4m3(bits_float(bits)); }
uint32_t e4m3_to_float(uint8_t code) { return float_bits(dgmoe::e4m3_to_float(code)); }
uint8_t float_to_ue8m0(uint32_t bits) { return dgmoe::float_to_ue8m0(bits_float(bits)); }
uint32_t ue8m0_to_float(uint8_t byte) { return float_bits(dgmoe::ue8m0_to_float(byte)); }
uint8_t exact_ue8m0(uint32_t bits) { return dgmoe::exact_ue8m0(bits_float(bits)); }
uint8_t float_to_e2m1(uint32_t bits) { return dgmoe::float_to_e2m1(bits_float(bits)); }
uint32_t e2m1_to_float(uint8_t code) { return float_bits(dgmoe::e2m1_to_float(code)); }
uint8_t e2m1_exponent(uint32_t amax) { return dgmoe::e2m1_exponent(amax); }
uint32_t group_scale(uint32_t amax, bool power) {
  return float_bits(dgmoe::group_scale(amax, power).scale);
}
uint8_t group_exponent(uint32_t amax, bool power) {
  return dgmoe::group_scale(amax, power).exponent;
}
uint32_t group_multiplier(uint32_t amax, bool power) {
  return float_bits(dgmoe::group_scale(amax, power).multiplier);
}
uint8_t quantize(uint32_t x, uint32_t multiplier) {
  return dgmoe::quantize(bits_float(x), bits_float(multiplier));
}
float exp_f32(float x) { return dgmoe::exp_f32(x); }
float tanh_f32(float x) { return dgmoe::tanh_f32(x); }
float gate(float x, float z) { return dgmoe::gate(x, z); }
float silu(float x) { return dgmoe::silu(x); }
float sigmoid(float x) { return dgmoe::sigmoid(x); }
float log1p_unit(float x) { return dgmoe::log1p_unit(x); }
float sqrt_softplus(float x) { return dgmoe::sqrt_softplus(x); }

}  // namespace

PYBIND11_MODULE(numerics_bind, m) {
  m.def("bf16_to_float", py::vectorize(bf16_to_float));
  m.def("float_to_bf16", py::vectorize(float_to_bf16));
  m.def("half_to_float", py::vectorize(half_to_float));
  m.def("float_to_e4m3", py::vectorize(float_to_e4m3));
  m.def("e4m3_to_float", py::vectorize(e4m3_to_float));
  m.def("float_to_ue8m0", py::vectorize(float_to_ue8m0));
  m.def("ue8m0_to_float", py::vectorize(ue8m0_to_float));
  m.def("exact_ue8m0", py::vectorize(exact_ue8m0));
  m.def("float_to_e2m1", py::vectorize(float_to_e2m1));
  m.def("e2m1_to_float", py::vectorize(e2m1_to_float));
  m.def("e2m1_exponent", py::vectorize(e2m1_exponent));
  m.def("group_scale", py::vectorize(group_scale));
  m.def("group_exponent", py::vectorize(group_exponent));
  m.def("group_multiplier", py::vectorize(group_multiplier));
  m.def("quantize", py::vectorize(quantize));
  m.def("exp_f32", py::vectorize(exp_f32));
  m.def("tanh_f32", py::vectorize(tanh_f32));
  m.def("gate", py::vectorize(gate));
  m.def("silu", py::vectorize(silu));
  m.def("sigmoid", py::vectorize(sigmoid));
  m.def("log1p_unit", py::vectorize(log1p_unit));
  m.def("sqrt_softplus", py::vectorize(sqrt_softplus));

  m.def("ceil_div", [](int64_t a, int64_t b) { return dgmoe::ceil_div(a, b); });
  m.def("round_up", [](int64_t a, int64_t b) { return dgmoe::round_up(a, b); });
  m.def("tma_aligned", [](int64_t mn) { return dgmoe::tma_aligned(mn); });
  m.def("slab_rows", [](int64_t tokens) { return dgmoe::slab_rows(tokens); });
  m.def("contig_rows", [](int64_t assignments, int64_t experts, int64_t alignment) {
    return dgmoe::contig_rows(assignments, experts, alignment);
  });
  m.def("scale_offset", [](int64_t form, int64_t groups, int64_t batch_stride, int64_t row_stride,
                           int64_t column_stride, int64_t batch, int64_t row, int64_t column) {
    const dgmoe::ScaleStrides layout{static_cast<dgmoe::ScaleLayout>(form), groups, batch_stride,
                                    row_stride, column_stride};
    return layout.at(batch, row, column);
  });
  m.def("local_expert", [](int64_t id, int64_t expert_start, int64_t experts) {
    const dgmoe::IdMatrix ids{&id, true, 1, 1};
    return ids.local_expert(0, 0, expert_start, experts);
  });
}
