"""Group scales of numerics.h: worked numbers, the exact exponent, non-finite input."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

INF, NAN = 0x7F800000, 0x7FC00000


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def as_float(pattern: int) -> float:
    return struct.unpack("<f", struct.pack("<I", pattern))[0]


# amax, bits of fl(amax / 448), exponent byte, log2 of the multiplier, e4m3 code of amax
WORKED = [
    (0.0, 0x2A7B5124, 85, 42, 0x00),
    (1e-4, 0x346FACAD, 105, 22, 0x7D),
    (0.5, 0x3A924925, 118, 9, 0x78),
    (1.0, 0x3B124925, 119, 8, 0x78),
    (1.75, 0x3B800000, 119, 8, 0x7E),
    (1.7578125, 0x3B80924A, 120, 7, 0x76),
    (448.0, 0x3F800000, 127, 0, 0x7E),
    (450.0, 0x3F80924A, 128, -1, 0x76),
    (as_float(0x7F7F0000), 0x7B11B6DC, 247, -120, 0x78),
]


@pytest.mark.parametrize(("amax", "scale", "exponent", "power", "code"), WORKED)
def test_worked_numbers(numerics, amax, scale, exponent, power, code) -> None:
    assert int(numerics.group_scale(bits(amax), False)) == scale
    assert int(numerics.group_exponent(bits(amax), True)) == exponent
    multiplier = int(numerics.group_multiplier(bits(amax), True))
    assert as_float(multiplier) == 2.0**power
    assert int(numerics.group_scale(bits(amax), True)) == bits(2.0 ** (exponent - 127))
    assert int(numerics.quantize(bits(amax), multiplier)) == code


def least_exponent(value: Fraction) -> int:
    e = value.numerator.bit_length() - value.denominator.bit_length() - 1
    while Fraction(2) ** e < value:
        e += 1
    return e


@given(st.integers(bits(1e-10), INF - 1))
@example(bits(1.75))
@example(bits(1.75) - 1)
@example(bits(1.75) + 1)
@example(bits(448.0) + 1)
@example(INF - 1)
def test_the_exponent_is_exact(numerics, amax: int) -> None:
    """Rounding fl(1/448) and the product never moves a group across a power of two."""
    exact = 127 + least_exponent(Fraction(as_float(amax)) / 448)
    assert int(numerics.group_exponent(amax, True)) == exact


def test_the_exponent_is_exact_around_every_boundary(numerics) -> None:
    """The only amax values at risk stand next to 1.75 * 2^j."""
    for j in range(-33, 127):
        boundary = bits(1.75 * 2.0**j)
        for amax in range(boundary - 3, boundary + 4):
            if bits(1e-10) <= amax < INF:
                exact = 127 + least_exponent(Fraction(as_float(amax)) / 448)
                assert int(numerics.group_exponent(amax, True)) == exact


@given(st.integers(0, INF - 1))
def test_the_amax_element_stays_in_range(numerics, amax: int) -> None:
    value = np.uint32(amax).view(np.float32)
    for power_of_two in (False, True):
        multiplier = numerics.group_multiplier(amax, power_of_two)
        product = float(value) * float(np.uint32(multiplier).view(np.float32))
        assert product <= 448 * (1 + 2.0**-22)
        assert (int(numerics.quantize(amax, multiplier)) & 0x7F) <= 0x7E


@given(st.integers(0, INF - 1))
@example(0)
def test_fp32_scale_and_multiplier_are_ieee(numerics, amax: int) -> None:
    floored = max(np.uint32(amax).view(np.float32), np.float32(1e-10))
    inverse = np.uint32(0x3B124925).view(np.float32)
    assert int(numerics.group_scale(amax, False)) == int((floored * inverse).view(np.uint32))
    assert int(numerics.group_multiplier(amax, False)) == int(
        (np.float32(448) / floored).view(np.uint32)
    )


@given(st.integers(INF, 0x7FFFFFFF), st.booleans())
@example(INF, True)
@example(NAN, False)
def test_non_finite_amax_poisons_the_group(numerics, amax: int, power_of_two: bool) -> None:
    assert np.isnan(np.uint32(numerics.group_scale(amax, power_of_two)).view(np.float32))
    assert int(numerics.group_exponent(amax, power_of_two)) == 255
    multiplier = numerics.group_multiplier(amax, power_of_two)
    for value in (0.0, 1.0, -3.0):
        assert int(numerics.quantize(bits(value), multiplier)) == 0x7F
