import pytest
import torch
from helpers import (
    BF16,
    check_random,
    int32,
    misaligned,
    random_bf16,
    refused,
    same_bits,
    strided,
)
from hypothesis import given
from hypothesis.strategies import data

silu_quant = torch.ops.dgmoe.silu_and_mul_post_quant_contig
NAME = "silu_and_mul_post_quant_contig"
ALIGNMENT = 8
# Two segments of 8 and 16 rows, and a tile behind the last one that nobody uses.
M_INDICES = [0] * 3 + [-1] * 5 + [2] * 10 + [-1] * 6 + [-1] * 8


def segments(device) -> tuple[torch.Tensor, torch.Tensor]:
    return random_bf16((len(M_INDICES), 400), device), int32(M_INDICES, device)


def as_floats(scale: torch.Tensor, groups: int) -> torch.Tensor:
    packed = scale.dtype == torch.int32
    return torch.ops.dgmoe.unpack_ue8m0(scale, groups) if packed else scale


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


@pytest.mark.parametrize("form", [0, 1, 2])
@pytest.mark.parametrize("round_activation", [False, True])
def test_agrees_with_the_masked_layout(device, form: int, round_activation: bool) -> None:
    x = random_bf16((130, 400), device)
    options = {"group_size": 32, "scale_layout": form, "round_activation": round_activation}
    q, scale = silu_quant(x, **options)
    masked_q, masked_scale = torch.ops.dgmoe.silu_and_mul_post_quant_masked(
        x[None], int32([130], device), **options
    )
    assert same_bits(q, masked_q[0]) and same_bits(scale, masked_scale[0])


@pytest.mark.parametrize("form", [0, 1, 2])
def test_padding_of_a_tile_has_scale_one(device, form: int) -> None:
    x, m_indices = segments(device)
    x[m_indices < 0] = float("nan")
    q, scale = silu_quant(x, m_indices, scale_layout=form, alignment=ALIGNMENT)
    values = as_floats(scale, 2)
    assert (values[3:8] == 1).all() and (values[18:24] == 1).all()
    every_q, every_scale = silu_quant(x, scale_layout=form)
    valid = m_indices >= 0
    assert same_bits(q.view(torch.uint8)[valid], every_q.view(torch.uint8)[valid])
    assert same_bits(scale[valid], every_scale[valid])


def test_padding_reaches_no_result(device) -> None:
    x, m_indices = segments(device)
    valid = m_indices >= 0
    q, scale = silu_quant(x, m_indices, alignment=ALIGNMENT)
    x[~valid] = float("nan")
    other_q, other_scale = silu_quant(x, m_indices, alignment=ALIGNMENT)
    assert same_bits(q.view(torch.uint8)[valid], other_q.view(torch.uint8)[valid])
    assert same_bits(scale[valid], other_scale[valid])


def test_fp32_is_quantised_by_default(device) -> None:
    """Rounding the product to bf16 first must not be what the op does unless it is asked to."""
    x = random_bf16((64, 512), device)
    plain, rounded = (
        silu_quant(x, scale_layout=2),
        silu_quant(x, scale_layout=2, round_activation=True),
    )
    assert not same_bits(plain[0], rounded[0])


def test_views_do_not_matter(device) -> None:
    x = random_bf16((9, 400), device)
    q, scale = silu_quant(x, scale_layout=2)
    for view in (strided(x), misaligned(x), x.t().contiguous().t()):
        found_q, found_scale = silu_quant(view, scale_layout=2)
        assert same_bits(found_q, q) and same_bits(found_scale, scale)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
@pytest.mark.parametrize("form", [0, 1, 2])
def test_empty(device, shape, form: int) -> None:
    q, scale = silu_quant(torch.zeros(shape, dtype=BF16, device=device), scale_layout=form)
    assert q.shape == (shape[0], shape[1] // 2) and scale.shape == (shape[0], min(1, shape[1]))


def test_refusals(device) -> None:
    x, m_indices = random_bf16((4, 8), device), int32([0, 0, 0, -1], device)
    for bad in (x.float(), x[0], x[None], x[:, :7]):
        with refused(NAME, "gate_up"):
            silu_quant(bad)
    for bad in (m_indices.long(), m_indices[:3], m_indices[None], strided(m_indices)):
        with refused(NAME, "m_indices"):
            silu_quant(x, bad)
    for arg, value in [("group_size", 64), ("scale_layout", -1)]:
        with refused(NAME, arg):
            silu_quant(x, m_indices, **{arg: value})
    for alignment in (0, -4, 7, 2**31):
        with refused(NAME, "alignment"):
            silu_quant(x, m_indices, alignment=alignment)
