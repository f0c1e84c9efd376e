"""The functions of numerics.h: a few units in the last place from exact, on every bf16 input."""

from __future__ import annotations

import numpy as np

LEAST_NORMAL = np.longdouble(2.0) ** -126


def ulps(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance in units of the last place of the exact value, rounded to fp32."""
    _, exponent = np.frexp(np.abs(exact))
    unit = np.ldexp(np.longdouble(1), np.maximum(exponent - 24, -149))
    return np.abs(found.astype(np.longdouble) - exact) / unit


def finite_bf16(all_bf16: np.ndarray) -> np.ndarray:
    values = (all_bf16.astype(np.uint32) << 16).view(np.float32)
    return values[np.isfinite(values)]


def test_exp_on_every_bf16_value(numerics, all_bf16) -> None:
    x = finite_bf16(all_bf16)
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.longdouble))
    found = numerics.exp_f32(x)
    in_range = (exact >= LEAST_NORMAL) & (exact < np.longdouble(2.0) ** 128 * (1 - 2.0**-25))
    assert ulps(found[in_range], exact[in_range]).max() <= 2
    assert np.isinf(found[exact >= np.longdouble(2.0) ** 128]).all()
    small = exact < LEAST_NORMAL
    assert (ulps(found[small], exact[small]) <= 2).all()


def test_exp_at_the_edges(numerics) -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, -104.5, 200.0], dtype=np.float32)
    np.testing.assert_array_equal(numerics.exp_f32(x), np.float32([1, 1, np.inf, 0, 0, np.inf]))
    assert np.isnan(numerics.exp_f32(np.float32(np.nan)))


def test_exp_between_the_bf16_values(numerics) -> None:
    x = np.random.default_rng(0).uniform(-87, 88, 200_000).astype(np.float32)
    assert ulps(numerics.exp_f32(x), np.exp(x.astype(np.longdouble))).max() <= 2


def test_silu_on_every_bf16_value(numerics, all_bf16) -> None:
    x = finite_bf16(all_bf16)
    wide = x.astype(np.longdouble)
    with np.errstate(over="ignore"):
        growth = np.exp(-wide)
    exact = wide / (1 + growth)
    found = numerics.silu(x)
    # Where e^-x overflows fp32, the result is a zero instead of some 1e-37.
    overflow = growth >= np.longdouble(2.0) ** 128
    assert (found[overflow] == 0).all()
    assert np.abs(exact[overflow]).max() < 3e-37
    normal = (np.abs(exact) >= LEAST_NORMAL) & ~overflow
    # Two for exp, half for the sum, half for the quotient.
    assert ulps(found[normal], exact[normal]).max() <= 3
    rest = ~normal & ~overflow
    assert (np.abs(found[rest] - exact[rest]) <= 2 * LEAST_NORMAL * 2.0**-23).all()


def test_silu_at_the_edges(numerics) -> None:
    assert numerics.silu(np.float32(0)) == 0
    assert numerics.silu(np.float32(np.inf)) == np.inf
    assert np.isnan(numerics.silu(np.float32(np.nan)))
    assert abs(float(numerics.silu(np.float32(-200)))) == 0


def test_sigmoid_on_every_bf16_value(numerics, all_bf16) -> None:
    x = finite_bf16(all_bf16)
    with np.errstate(over="ignore"):
        growth = np.exp(-x.astype(np.longdouble))
    exact = 1 / (1 + growth)
    found = numerics.sigmoid(x)
    overflow = growth >= np.longdouble(2.0) ** 128
    assert (found[overflow] == 0).all()
    normal = (exact >= LEAST_NORMAL) & ~overflow
    assert ulps(found[normal], exact[normal]).max() <= 3
    assert numerics.sigmoid(np.float32(np.inf)) == 1 and numerics.sigmoid(np.float32(-np.inf)) == 0
    assert np.isnan(numerics.sigmoid(np.float32(np.nan)))


def test_log1p_on_the_unit_interval(numerics) -> None:
    # Every 4099th float of [0, 1], subnormal ones too, and all those around the change of range.
    edge = np.float32(2**0.5 - 1).view(np.uint32)
    top = np.float32(1).view(np.uint32)
    bits = [np.arange(0, top + 1, 4099), edge + np.arange(-1000, 1000), top - np.arange(1000)]
    x = np.concatenate(bits).astype(np.uint32).view(np.float32)
    assert ulps(numerics.log1p_unit(x), np.log1p(x.astype(np.longdouble))).max() <= 2
    assert numerics.log1p_unit(np.float32(0)) == 0
    assert np.isnan(numerics.log1p_unit(np.float32(np.nan)))


def test_sqrt_softplus_on_every_bf16_value(numerics, all_bf16) -> None:
    x = finite_bf16(all_bf16)
    wide = x.astype(np.longdouble)
    exact = np.sqrt(np.maximum(wide, 0) + np.log1p(np.exp(-np.abs(wide))))
    found = numerics.sqrt_softplus(x)
    # Below that e^x is subnormal: its few bits are all that the root has.
    normal = wide > -87
    assert ulps(found[normal], exact[normal]).max() <= 4
    assert (np.abs(found - exact)[~normal] <= 4e-23).all()


def test_sqrt_softplus_at_the_edges(numerics) -> None:
    assert numerics.sqrt_softplus(np.float32(np.inf)) == np.inf
    assert numerics.sqrt_softplus(np.float32(-np.inf)) == 0
    assert numerics.sqrt_softplus(np.float32(400)) == 20
    assert np.isnan(numerics.sqrt_softplus(np.float32(np.nan)))


def test_tanh_on_every_bf16_value(numerics, all_bf16) -> None:
    x = finite_bf16(all_bf16)
    found = numerics.tanh_f32(x)
    assert ulps(found, np.tanh(x.astype(np.longdouble))).max() <= 2
    np.testing.assert_array_equal(found.view(np.uint32) >> 31, x.view(np.uint32) >> 31)


def test_tanh_between_the_bf16_values(numerics) -> None:
    rng = np.random.default_rng(0)
    wide = rng.uniform(-12, 12, 400_000)
    small = np.exp2(rng.uniform(-40, 0, 200_000))
    seam = 0.55 + rng.uniform(-1e-3, 1e-3, 100_000)
    x = np.concatenate([wide, small, seam]).astype(np.float32)
    found = numerics.tanh_f32(x)
    assert ulps(found, np.tanh(x.astype(np.longdouble))).max() <= 2
    assert (np.abs(found) <= 1).all()
    np.testing.assert_array_equal(numerics.tanh_f32(-x), -found)


def test_tanh_at_the_edges(numerics) -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-40, 3e38], dtype=np.float32)
    expected = np.float32([0, -0.0, 1, -1, 1e-45, -1e-40, 1])
    np.testing.assert_array_equal(numerics.tanh_f32(x).view(np.uint32), expected.view(np.uint32))
    assert np.isnan(numerics.tanh_f32(np.float32(np.nan)))


def test_gate_is_x_times_a_sigmoid(numerics) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(200_000) * 8).astype(np.float32)
    z = rng.uniform(-80, 80, x.size).astype(np.float32)
    exact = x.astype(np.longdouble) / (1 + np.exp(-z.astype(np.longdouble)))
    assert ulps(numerics.gate(x, z), exact).max() <= 3
    np.testing.assert_array_equal(numerics.gate(x, x), numerics.silu(x))
