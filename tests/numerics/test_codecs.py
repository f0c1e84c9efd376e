"""The codecs of numerics.h: every value of the small types, against torch and exact numbers."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

INF, NAN, MINUS_ZERO = 0x7F800000, 0x7FC00000, 0x80000000
any_bits = st.integers(0, 0xFFFFFFFF)
finite_positive_bits = st.integers(1, INF - 1)


def as_float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def as_torch(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The tensor whose elements have these bits."""
    signed = {1: np.int8, 2: np.int16, 4: np.int32}[bits.dtype.itemsize]
    return torch.from_numpy(bits.view(signed).copy()).view(dtype)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    kinds = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}
    view, dtype = kinds[tensor.element_size()]
    return tensor.view(view).numpy().view(dtype)


def ceil_log2(value: Fraction) -> int:
    """The least e with 2^e >= value, exactly."""
    e = value.numerator.bit_length() - value.denominator.bit_length() - 1
    while Fraction(2) ** e < value:
        e += 1
    return e


def nearest_e4m3(value: float) -> int:
    """The code nearest to a finite value, ties to the even code, saturating."""
    codes = [(Fraction(as_e4m3(code)), code) for code in range(0x7F)]
    exact = abs(Fraction(value))
    code = min(codes, key=lambda entry: (abs(entry[0] - exact), entry[1] & 1))[1]
    return code | (0x80 if math.copysign(1.0, value) < 0 else 0)


def as_e4m3(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


def test_bf16_to_float_on_every_value(numerics, all_bf16) -> None:
    expected = bits_of(as_torch(all_bf16, torch.bfloat16).float())
    np.testing.assert_array_equal(numerics.bf16_to_float(all_bf16), expected)


def test_bf16_survives_the_round_trip(numerics, all_bf16) -> None:
    back = numerics.float_to_bf16(numerics.bf16_to_float(all_bf16))
    nan = (all_bf16 & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(back[~nan], all_bf16[~nan])
    assert (back[nan] == 0x7FC0).all()


@given(any_bits)
@example(0x7F7FFFFF)
@example(0x3F808000)  # ties, to even: down here, up below
@example(0x3F818000)
@example(0x00008000)
@example(0x7FFFFFFF)
def test_float_to_bf16_rounds_as_torch_does(numerics, bits: int) -> None:
    value = as_torch(np.array([bits], dtype=np.uint32), torch.float32)
    expected = 0x7FC0 if value.isnan() else int(bits_of(value.bfloat16())[0])
    assert int(numerics.float_to_bf16(bits)) == expected


def test_half_to_float_on_every_value(numerics, all_bf16) -> None:
    expected = bits_of(as_torch(all_bf16, torch.float16).float())
    found = numerics.half_to_float(all_bf16)
    nan = np.isnan(expected.view(np.float32))
    np.testing.assert_array_equal(found[~nan], expected[~nan])
    assert np.isnan(found[nan].view(np.float32)).all()


def test_e4m3_of_every_bf16_value(numerics, all_bf16) -> None:
    value = as_torch(all_bf16, torch.bfloat16).float()
    # Clamped first: torch's own cast does not saturate in every version.
    expected = bits_of(value.clamp(-448, 448).to(torch.float8_e4m3fn)).copy()
    expected[value.isnan().numpy()] = 0x7F
    np.testing.assert_array_equal(numerics.float_to_e4m3(bits_of(value)), expected)


@given(any_bits)
@example(0x43E00000)  # 448
@example(0x43E80000)  # 464, where a plain cast turns to NaN
@example(INF)
@example(INF | 0x80000000)
@example(0x3A800000)  # 2^-10, a tie between 0 and the least subnormal
@example(0x3A800001)
@example(0x3C780000)  # a tie between the greatest subnormal and the least normal
@example(0x80000000)
def test_float_to_e4m3_is_the_nearest(numerics, bits: int) -> None:
    value = as_float(bits)
    if math.isnan(value):
        expected = 0x7F
    elif math.isinf(value):
        expected = 0xFE if value < 0 else 0x7E
    else:
        expected = nearest_e4m3(value)
    assert int(numerics.float_to_e4m3(bits)) == expected


def test_e4m3_to_float_of_every_code(numerics) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = bits_of(as_torch(codes, torch.float8_e4m3fn).float())
    found = numerics.e4m3_to_float(codes)
    nan = (codes & 0x7F) == 0x7F
    np.testing.assert_array_equal(found[~nan], expected[~nan])
    assert np.isnan(found[nan].view(np.float32)).all()
    exact = [as_e4m3(int(code)) for code in codes[:0x7F]]
    np.testing.assert_array_equal(found[:0x7F].view(np.float32), np.array(exact, dtype=np.float32))


def test_ue8m0_of_every_byte(numerics) -> None:
    codes = np.arange(256, dtype=np.uint8)
    found = numerics.ue8m0_to_float(codes).view(np.float32)
    np.testing.assert_array_equal(found[:255], np.float32([2.0 ** (b - 127) for b in range(255)]))
    assert np.isnan(found[255])
    back = numerics.float_to_ue8m0(found.view(np.uint32))
    # Byte 0 only ever pads: what it decodes to encodes as 1.
    np.testing.assert_array_equal(back, np.maximum(codes, 1))


@given(finite_positive_bits)
@example(0x3F800000)
@example(0x3F800001)
@example(0x3FFFFFFF)
@example(0x7F000001)  # above 2^127: clamped
@example(0x00400000)
@example(1)
def test_float_to_ue8m0_rounds_up(numerics, bits: int) -> None:
    exact = 127 + ceil_log2(Fraction(as_float(bits)))
    assert int(numerics.float_to_ue8m0(bits)) == min(max(exact, 1), 254)


@given(any_bits)
@example(INF)
@example(NAN)
@example(0x80000001)
def test_float_to_ue8m0_of_what_is_no_scale(numerics, bits: int) -> None:
    found = int(numerics.float_to_ue8m0(bits))
    assert (found == 255) == (bits >= INF and bits != MINUS_ZERO)
    assert found != 0


def test_zero_scale_of_either_sign_is_the_least_one(numerics) -> None:
    assert int(numerics.float_to_ue8m0(0)) == 1
    assert int(numerics.float_to_ue8m0(MINUS_ZERO)) == 1
