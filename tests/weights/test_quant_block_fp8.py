import pytest
import torch
from helpers import bits, check_random, misaligned, random_bf16, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

quant = torch.ops.dgmoe.quant_block_fp8
NAME = "quant_block_fp8"


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


@pytest.mark.parametrize(
    ("amax", "exponent", "code"),
    [
        (0.0, 85, 0x00),
        (1.0, 119, 0x78),
        (1.75, 119, 0x7E),
        (1.7578125, 120, 0x76),
        (448.0, 127, 0x7E),
        (450.0, 128, 0x76),
    ],
)
def test_worked_blocks(device, amax: float, exponent: int, code: int) -> None:
    weight = torch.zeros(130, 129, device=device)
    weight[129, 128] = -amax
    q, scale = quant(weight, True)
    assert scale.shape == (2, 2) and float(scale[1, 1]) == 2.0 ** (exponent - 127)
    assert int(bits(q)[129, 128]) == (code | 0x80)
    assert (scale.flatten()[:3] == 2.0 ** (85 - 127)).all()


def test_each_block_has_its_own_scale(device) -> None:
    weight = torch.ones(2, 300, 260, device=device)
    factors = torch.pow(2.0, torch.arange(18).float()).view(2, 3, 3).to(device)
    spread = factors.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :300, :260]
    q, scale = quant(weight * spread)
    inverse = torch.tensor(0x3B124925, dtype=torch.int32).view(torch.float32).to(device)
    assert same_bits(scale, factors * inverse)
    assert (q.float() == 448).all()


def test_a_block_of_one_row_is_a_group(device) -> None:
    weight = random_bf16((1, 300), device)
    for rounded in (False, True):
        q, scale = quant(weight, rounded)
        group_q, group_scale = torch.ops.dgmoe.quant_group_fp8(weight, 128, 0, rounded)
        assert same_bits(q, group_q) and same_bits(scale, group_scale)


def test_experts_are_independent(device) -> None:
    weight = random_bf16((3, 140, 200), device)
    q, scale = quant(weight)
    for e in range(3):
        one_q, one_scale = quant(weight[e])
        assert same_bits(q[e], one_q) and same_bits(scale[e], one_scale)


def test_error_is_within_half_a_step(device) -> None:
    weight = random_bf16((256, 384), device).float()
    for rounded in (False, True):
        q, scale = quant(weight, rounded)
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        error = (q.float() * spread - weight).abs()
        assert (error <= weight.abs() * (2.0**-4 + 1e-6) + spread * 2.0**-10).all()


def test_non_finite_poisons_its_block_only(device) -> None:
    weight = random_bf16((200, 200), device)
    clean_q, clean_scale = quant(weight)
    weight[150, 10] = float("inf")
    q, scale = quant(weight)
    assert scale[1, 0].isnan() and ((bits(q)[128:, :128] & 0x7F) == 0x7F).all()
    scale[1, 0] = clean_scale[1, 0]
    assert same_bits(scale, clean_scale)
    assert same_bits(q[:128], clean_q[:128]) and same_bits(q[:, 128:], clean_q[:, 128:])


def test_views_do_not_matter(device) -> None:
    weight = random_bf16((2, 140, 131), device)
    q, scale = quant(weight)
    turned = weight.transpose(0, 1).contiguous().transpose(0, 1)
    for view in (strided(weight), misaligned(weight), turned, weight.float()):
        found_q, found_scale = quant(view)
        assert same_bits(found_q, q) and same_bits(found_scale, scale)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0), (0, 8, 8), (2, 0, 8), (2, 8, 0)])
def test_empty(device, shape) -> None:
    q, scale = quant(torch.zeros(shape, device=device))
    assert q.shape == shape
    assert scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))


def test_refusals(device) -> None:
    weight = torch.zeros(4, 8, device=device)
    for bad in (weight.half(), weight.double(), weight[0], weight[None, None]):
        with refused(NAME, "weight"):
            quant(bad)
