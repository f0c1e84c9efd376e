import pytest
import torch
from helpers import (
    BF16,
    check_padding_reaches_no_result,
    check_random,
    check_views_do_not_matter,
    int32,
    random_bf16,
)
from hypothesis import given
from hypothesis.strategies import data

situ = torch.ops.dgmoe.situ_and_mul_post_quant_masked
NAME = "situ_and_mul_post_quant_masked"
BETAS = {"beta": 4.0, "linear_beta": 25.0}


def outputs(x: torch.Tensor, masked_m) -> tuple[torch.Tensor, ...]:
    out = situ(x, masked_m, scale_layout=2, **BETAS)
    return out if isinstance(out, tuple) else (out,)


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def operands(device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate_up, masked_m, and which rows are valid."""
    masked_m = int32([4, 0, 9], device)
    valid = torch.arange(9) < masked_m.cpu()[:, None]
    return random_bf16((3, 9, 400), device), masked_m, valid


def test_padding_reaches_no_result(device) -> None:
    x, masked_m, valid = operands(device)
    check_padding_reaches_no_result(lambda x: outputs(x, masked_m), x, valid)


def test_views_do_not_matter(device) -> None:
    x, masked_m, valid = operands(device)
    check_views_do_not_matter(lambda x: outputs(x, masked_m), x, valid)


def test_the_betas_have_no_default(device) -> None:
    x = random_bf16((1, 2, 8), device)
    with pytest.raises(RuntimeError, match="linear_beta"):
        situ(x, int32([2], device), beta=4.0)


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_empty(device, shape) -> None:
    x = torch.zeros(shape, dtype=BF16, device=device)
    found = outputs(x, int32([shape[1]] * shape[0], device))
    assert found[0].shape == (*shape[:-1], shape[-1] // 2)


def test_small_betas_saturate(device) -> None:
    """Far past the betas only their product is left: beta * linear_beta."""
    x = torch.full((1, 1, 256), 100.0, dtype=BF16, device=device)
    out = situ(x, int32([1], device), beta=0.5, linear_beta=3.0)
    q, scale = out
    values = q.float() * scale
    assert ((values - 1.5).abs() < 1e-5).all()
