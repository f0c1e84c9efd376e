import pytest
import torch
from helpers import bits, check_random, misaligned, random_bf16, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

quant = torch.ops.dgmoe.quant_mxfp8
NAME = "quant_mxfp8"


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_each_group_has_its_own_exponent(device) -> None:
    """7 rows of 9 groups, 63 exponents: a byte in another place would show."""
    exponents = (100 + torch.arange(63).view(7, 9)).to(device)
    weight = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1) * 448
    q, scale = quant(weight[:, :270])
    assert scale.shape == (7, 9) and scale.dtype == torch.uint8
    assert torch.equal(scale.long(), exponents) and (q.float() == 448).all()


@pytest.mark.parametrize(("amax", "byte", "code"), [
    (0.0, 85, 0x00), (1.75, 119, 0x7E), (1.7578125, 120, 0x76), (448.0, 127, 0x7E),
    (450.0, 128, 0x76),
])  # fmt: skip
def test_worked_groups(device, amax: float, byte: int, code: int) -> None:
    weight = torch.zeros(2, 64, device=device)
    weight[1, 40] = -amax
    q, scale = quant(weight)
    assert scale.tolist() == [[85, 85], [85, byte]]
    assert int(bits(q)[1, 40]) == code | 0x80


def test_agrees_with_the_activations_quantiser(device) -> None:
    weight = random_bf16((9, 200), device)
    q, scale = quant(weight)
    group_q, group_scale = torch.ops.dgmoe.quant_group_fp8(weight, 32, 0, True)
    assert same_bits(q, group_q)
    assert torch.equal(torch.exp2(scale.float() - 127), group_scale)
    assert same_bits(torch.ops.dgmoe.pack_ue8m0(scale), torch.ops.dgmoe.pack_ue8m0(group_scale))


def test_non_finite_poisons_its_group_only(device) -> None:
    weight = random_bf16((3, 100), device)
    clean_q, clean_scale = quant(weight)
    weight[1, 35] = float("-inf")
    q, scale = quant(weight)
    assert int(scale[1, 1]) == 255 and (bits(q)[1, 32:64] == 0x7F).all()
    scale[1, 1] = clean_scale[1, 1]
    assert same_bits(scale, clean_scale)
    keep = torch.ones(3, 100, dtype=torch.bool)
    keep[1, 32:64] = False
    assert torch.equal(bits(q)[keep], bits(clean_q)[keep])


def test_views_and_experts_do_not_matter(device) -> None:
    weight = random_bf16((2, 14, 131), device)
    q, scale = quant(weight)
    for view in (strided(weight), misaligned(weight), weight.float()):
        found_q, found_scale = quant(view)
        assert same_bits(found_q, q) and same_bits(found_scale, scale)
    one_q, one_scale = quant(weight[1])
    assert same_bits(q[1], one_q) and same_bits(scale[1], one_scale)


def test_refusals(device) -> None:
    weight = torch.zeros(4, 8, device=device)
    for bad in (weight.half(), weight.to(torch.int8), weight[0], weight[None, None]):
        with refused(NAME, "weight"):
            quant(bad)
