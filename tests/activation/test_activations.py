"""The table of activations: what it refuses, and that wrappers and table say the same."""

import inspect

import pytest

import dgmoe_ops
from dgmoe_ops.layer.activations import ACTIVATIONS, DEFAULTS, check_activation


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("suffix", ["", "_post_quant_masked", "_post_quant_contig"])
def test_the_ops_take_what_the_table_says(name: str, suffix: str) -> None:
    row = ACTIVATIONS[name]
    taken = inspect.signature(getattr(dgmoe_ops.ops, row.op + suffix)).parameters
    for parameter in row.parameters:
        required = taken[parameter.name].default is inspect.Parameter.empty
        assert required == parameter.required


def test_defaults_are_filled_in() -> None:
    assert check_activation("silu") == {"swiglu_limit": None}
    assert check_activation("silu", swiglu_limit=10) == {"swiglu_limit": 10}
    gpt_oss = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
    assert check_activation("swigluoai") == gpt_oss
    assert check_activation("swigluoai", gemm1_alpha=1.5, beta=None)["gemm1_alpha"] == 1.5
    unclamped = gpt_oss | {"gemm1_clamp_limit": None}
    assert check_activation("swigluoai", gemm1_clamp_limit=None) == unclamped
    assert check_activation("silu", **gpt_oss) == {"swiglu_limit": None}
    assert check_activation("silu", gemm1_alpha=None, gemm1_clamp_limit=None)
    betas = {"beta": 4.0, "linear_beta": 25.0}
    assert check_activation("situ", **betas) == betas


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("gelu", {}, "activation must be one of silu, swigluoai, situ, got 'gelu'"),
        ("silu", {"beta": 1.0}, "'silu': beta must be None .it takes swiglu_limit., got 1.0"),
        ("swigluoai", {"swiglu_limit": 7.0}, "swiglu_limit must be None .it takes gemm1_alpha"),
        ("situ", {"beta": 1.0}, "'situ': linear_beta must be given"),
        ("silu", {"swiglu_limit": 0.0}, "swiglu_limit must be positive"),
        ("silu", {"swiglu_limit": float("inf")}, "swiglu_limit must be finite"),
        ("silu", {"swiglu_limit": "7"}, "swiglu_limit must be a number, got '7'"),
        ("silu", {"swiglu_limit": True}, "swiglu_limit must be a number"),
        ("swigluoai", {"gemm1_clamp_limit": -7.0}, "gemm1_clamp_limit must be positive"),
        ("swigluoai", {"gemm1_alpha": float("nan")}, "gemm1_alpha must be finite"),
        ("swigluoai", {"gemm1_alpha": None}, "gemm1_alpha must be a number, got None"),
        ("silu", {"gemm1_clamp_limit": 6.0}, "'silu': gemm1_clamp_limit must be None .it takes"),
        ("situ", {"beta": None, "linear_beta": 1.0}, "'situ': beta must be given, got None"),
        ("swigluoai", {"gemm1_alpha": -1e-39}, "gemm1_alpha must be 0 or at least 1.18e-38"),
        ("silu", {"swiglu_limit": 1e-39}, "swiglu_limit must be positive as float32"),
        ("situ", {"beta": -4.0, "linear_beta": 1.0}, "beta must be positive"),
        ("situ", {"beta": 1e39, "linear_beta": 1.0}, "beta must be finite as float32"),
    ],
)
def test_refusals(name: str, given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_activation(name, **given)


def test_the_layer_has_the_defaults_of_the_table() -> None:
    for call in (dgmoe_ops.fused_moe, dgmoe_ops.fused_moe_inline):
        taken = inspect.signature(call).parameters
        assert {name: taken[name].default for name in DEFAULTS} == DEFAULTS


def test_alpha_may_have_either_sign() -> None:
    assert check_activation("swigluoai", gemm1_alpha=-1.0)["gemm1_alpha"] == -1.0
