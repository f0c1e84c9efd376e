import pytest
import torch
from helpers import (
    BF16,
    check_padding_reaches_no_result,
    check_random,
    check_views_do_not_matter,
    int32,
    random_bf16,
    refused,
)
from hypothesis import given
from hypothesis.strategies import data

situ = torch.ops.dgmoe.situ_and_mul_post_quant_contig
NAME = "situ_and_mul_post_quant_contig"
M_INDICES = [0] * 3 + [-1] + [2] * 6 + [-1] * 2
BETAS = {"beta": 4.0, "linear_beta": 25.0}


def outputs(x: torch.Tensor, m_indices) -> tuple[torch.Tensor, ...]:
    out = situ(x, m_indices, scale_layout=2, alignment=4, **BETAS)
    return out if isinstance(out, tuple) else (out,)


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def operands(device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate_up, m_indices, and which rows are valid."""
    m_indices = int32(M_INDICES, device)
    return random_bf16((len(M_INDICES), 400), device), m_indices, (m_indices >= 0).cpu()


def test_padding_reaches_no_result(device) -> None:
    x, m_indices, valid = operands(device)
    check_padding_reaches_no_result(lambda x: outputs(x, m_indices), x, valid)


def test_views_do_not_matter(device) -> None:
    x, m_indices, valid = operands(device)
    check_views_do_not_matter(lambda x: outputs(x, m_indices), x, valid)


def test_the_betas_have_no_default(device) -> None:
    x = random_bf16((2, 8), device)
    with pytest.raises(RuntimeError, match="linear_beta"):
        situ(x, int32([0, 0], device), beta=4.0)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
def test_empty(device, shape) -> None:
    x = torch.zeros(shape, dtype=BF16, device=device)
    found = outputs(x, int32([0] * shape[0], device))
    assert found[0].shape == (*shape[:-1], shape[-1] // 2)


def test_small_betas_saturate(device) -> None:
    """Far past the betas only their product is left: beta * linear_beta."""
    x = torch.full((1, 256), 100.0, dtype=BF16, device=device)
    out = situ(x, int32([0], device), beta=0.5, linear_beta=3.0)
    q, scale = out
    values = q.float() * scale
    assert ((values - 1.5).abs() < 1e-5).all()


def test_refuses_an_alignment_that_no_segment_has(device) -> None:
    x = random_bf16((2, 8), device)
    for alignment in (0, -4, 7, 2**31):
        with refused(NAME, "alignment"):
            situ(x, int32([0, 0], device), alignment=alignment, **BETAS)
