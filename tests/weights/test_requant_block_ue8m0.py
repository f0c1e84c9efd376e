import pytest
import torch
from helpers import F8, bits, check_random, misaligned, random_f8, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

requant = torch.ops.dgmoe.requant_block_ue8m0
NAME = "requant_block_ue8m0"


def spread(scale: torch.Tensor, n: int, k: int) -> torch.Tensor:
    return scale.repeat_interleave(128, -2)[..., :n, :].repeat_interleave(128, -1)[..., :k]


def powers(shape: tuple[int, ...], first: int, device) -> torch.Tensor:
    """Exponent bytes, no two alike."""
    count = torch.Size(shape).numel()
    return (first + torch.arange(count)).view(shape).to(torch.uint8).to(device)


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


@pytest.mark.parametrize("kind", ["float", "uint8", "e8m0"])
@pytest.mark.parametrize("first", [0, 115, 240])
def test_powers_of_two_change_nothing(device, kind: str, first: int) -> None:
    """Bytes of every kind under scales from 2^-127 to 2^127, a distinct one a block."""
    code = torch.arange(2 * 300 * 259).view(2, 300, 259).to(torch.uint8).to(device)
    byte = powers((2, 3, 3), first, device).clamp(max=254)
    if first == 240:
        byte = byte.clamp(max=254)
    scale = byte.view(torch.float8_e8m0fnu)
    given = {"float": scale.float(), "uint8": byte, "e8m0": scale}[kind]
    q, found = requant(code.view(F8), given)
    assert same_bits(q, code.view(F8)) and same_bits(found, byte)


def test_nan_bytes_stay(device) -> None:
    weight = random_f8((130, 8), device)
    byte = torch.tensor([[255], [7]], dtype=torch.uint8, device=device)
    q, found = requant(weight, byte)
    assert same_bits(q, weight) and same_bits(found, byte)


def test_other_scales_round_each_value_once_more(device) -> None:
    weight = random_f8((2, 256, 384), device)
    scale = torch.exp2(powers((2, 2, 3), 100, device).float() - 127) * 1.37
    q, byte = requant(weight, scale)
    exact = weight.float() * spread(scale, 256, 384)
    found = q.float() * spread(torch.exp2(byte.float() - 127), 256, 384)
    step = spread(torch.exp2(byte.float() - 127), 256, 384) * 2.0**-10
    assert ((found - exact).abs() <= exact.abs() * (2.0**-4 + 1e-6) + step).all()
    again, again_byte = requant(q, byte)
    assert same_bits(again, q) and same_bits(again_byte, byte)
    dense_q, dense_scale = torch.ops.dgmoe.quant_block_fp8(exact, True)
    assert same_bits(q, dense_q)
    assert torch.equal(torch.exp2(byte.float() - 127), dense_scale)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_broken_scale_poisons_its_block_only(device, value: float) -> None:
    weight = random_f8((256, 256), device)
    scale = torch.tensor([[0.3, 0.5], [0.7, 1.1]], device=device)
    clean_q, clean = requant(weight, scale)
    scale[1, 0] = value
    q, byte = requant(weight, scale)
    assert int(byte[1, 0]) == 255 and (bits(q)[128:, :128] == 0x7F).all()
    byte[1, 0] = clean[1, 0]
    assert same_bits(byte, clean)
    assert same_bits(q[:128], clean_q[:128]) and same_bits(q[:, 128:], clean_q[:, 128:])


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_scale_of_zero_gives_zeros(device, zero: float) -> None:
    q, byte = requant(random_f8((4, 4), device), torch.full((1, 1), zero, device=device))
    assert (q.float() == 0).all() and int(byte) == 85


def test_views_and_experts_do_not_matter(device) -> None:
    weight = random_f8((2, 140, 136), device)
    scale = torch.rand(2, 2, 2, device=device) + 0.1
    q, byte = requant(weight, scale)
    as_bytes = weight.view(torch.uint8)
    for view in (strided(as_bytes).view(F8), misaligned(as_bytes).view(F8)):
        found_q, found = requant(view, strided(scale))
        assert same_bits(found_q, q) and same_bits(found, byte)
    one_q, one = requant(weight[1], scale[1])
    assert same_bits(q[1], one_q) and same_bits(byte[1], one)


def test_refusals(device) -> None:
    weight = random_f8((2, 140, 136), device)
    scale = torch.ones(2, 2, 2, device=device)
    for bad in (weight.float(), weight.view(torch.uint8), weight[0, 0], weight[None]):
        with refused(NAME, "weight"):
            requant(bad, scale)
    wrong_grid = torch.ones(2, 140, 5, device=device)
    for bad in (scale.bfloat16(), scale.int(), scale[0], scale[:1], scale[:, :1], wrong_grid):
        with refused(NAME, "scale"):
            requant(weight, bad)
