"""The codecs of the MX formats: e2m1, its group exponent, and scales that must be exact."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

INF, NAN = 0x7F800000, 0x7FC00000
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
any_bits = st.integers(0, 0xFFFFFFFF)


def as_float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits_of(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def nearest_e2m1(value: float) -> int:
    """The code nearest to a value, ties to the even code, saturating."""
    exact = Fraction(min(abs(value), 1e9))
    code = min(range(8), key=lambda c: (abs(Fraction(VALUES[c]) - exact), c & 1))
    return code | (8 if math.copysign(1.0, value) < 0 else 0)


def test_e2m1_to_float_of_every_code(numerics) -> None:
    found = numerics.e2m1_to_float(np.arange(16, dtype=np.uint8)).view(np.float32)
    expected = np.array([*VALUES, *(-v for v in VALUES)], dtype=np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_e2m1_of_every_bf16_value(numerics, all_bf16) -> None:
    bits = all_bf16.astype(np.uint32) << 16
    bits = bits[(bits & 0x7FFFFFFF) <= INF]
    expected = [nearest_e2m1(as_float(int(b))) for b in bits]
    np.testing.assert_array_equal(numerics.float_to_e2m1(bits), np.array(expected, dtype=np.uint8))


@given(any_bits)
@example(bits_of(0.25) + 1)
@example(bits_of(0.75) - 1)
@example(bits_of(1.25) + 1)
@example(bits_of(1.75) - 1)
@example(bits_of(2.5) + 1)
@example(bits_of(3.5) - 1)
@example(bits_of(5.0) + 1)
@example(INF | 0x80000000)
def test_float_to_e2m1_is_the_nearest(numerics, bits: int) -> None:
    value = as_float(bits)
    if not math.isnan(value):
        assert int(numerics.float_to_e2m1(bits)) == nearest_e2m1(value)


@given(st.integers(0, INF - 1))
@example(bits_of(6.0))
@example(bits_of(6.0) + 1)
@example(bits_of(1e-10))
@example(0)
@example(INF - 1)
def test_e2m1_exponent_is_the_least_that_fits(numerics, bits: int) -> None:
    amax = max(Fraction(as_float(bits)), Fraction(as_float(bits_of(1e-10))))
    byte = int(numerics.e2m1_exponent(bits))
    assert 92 <= byte <= 253
    assert amax <= 6 * Fraction(2) ** (byte - 127) and amax > 6 * Fraction(2) ** (byte - 128)


@given(st.integers(INF, 0x7FFFFFFF))
def test_e2m1_exponent_of_what_is_broken(numerics, bits: int) -> None:
    assert int(numerics.e2m1_exponent(bits)) == 255


@given(any_bits)
@example(0)
@example(0x80000000)
@example(0x00400000)
@example(0x00200000)
@example(0x00800000)
@example(0x7F000000)
@example(INF)
@example(NAN)
@example(0xBF800000)
def test_exact_ue8m0_rounds_nothing(numerics, bits: int) -> None:
    byte = int(numerics.exact_ue8m0(bits))
    if bits in (0, 0x80000000):
        assert byte == 0
    elif byte != 255:
        assert as_float(bits) == 2.0 ** (byte - 127)
    else:
        assert as_float(bits) not in {2.0 ** (b - 127) for b in range(255)}
