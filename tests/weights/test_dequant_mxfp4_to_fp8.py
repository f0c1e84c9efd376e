import pytest
import torch
from helpers import F8, bits, check_random, misaligned, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

convert = torch.ops.dgmoe.dequant_mxfp4_to_fp8
NAME = "dequant_mxfp4_to_fp8"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def values(weight: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
    """What MXFP4 means, float64."""
    pairs = weight.cpu().view(torch.uint8).long()
    code = torch.stack((pairs % 16, pairs // 16), -1).flatten(-2)
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], dtype=torch.float64)
    spread = torch.exp2(byte.cpu().double() - 127).repeat_interleave(32, -1)
    return table[code] * spread[..., : code.shape[-1]]


def block_values(q: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
    n, k = q.shape[-2:]
    spread = torch.exp2(byte.cpu().double() - 127).repeat_interleave(128, -2)[..., :n, :]
    return q.cpu().float().double() * spread.repeat_interleave(128, -1)[..., :k]


def codes(shape: tuple[int, ...], device) -> torch.Tensor:
    """Every pair of codes."""
    return torch.arange(torch.Size(shape).numel()).view(shape).to(torch.uint8).to(device)


def spread_bytes(n: int, groups: int, width: int, device) -> torch.Tensor:
    """Group exponents within `width` of each other in a block; blocks differ, as do neighbours."""
    row, group = torch.arange(n).view(-1, 1), torch.arange(groups)
    inside = (row * 5 + group % 4 * 3) % (width + 1)
    block = 100 + row // 128 * 31 + group // 4 * 11
    return (inside + block).to(torch.uint8).to(device)


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_worked_block(device) -> None:
    weight = torch.zeros(1, 64, dtype=torch.uint8, device=device)
    weight[0, 0], weight[0, 16] = 0x07, 0x10  # 6 in the first group, 0.5 in the second
    byte = torch.tensor([[127, 124, 124, 124]], dtype=torch.uint8, device=device)
    q, scale = convert(weight, byte)
    assert int(scale) == 121 and int(bits(q)[0, 0]) == 0x7C and int(bits(q)[0, 33]) == 0x48


@pytest.mark.parametrize("kind", ["uint8", "e8m0", "float"])
@pytest.mark.parametrize("width", [0, 6, 14])
def test_exact_where_scales_spread_little(device, kind: str, width: int) -> None:
    weight = codes((300, 192), device)
    byte = spread_bytes(300, 12, width, device)
    given = byte if kind == "uint8" else byte.view(torch.float8_e8m0fnu)
    q, scale = convert(weight, given.float() if kind == "float" else given)
    assert scale.shape == (3, 3) and len(scale.unique()) == 9
    assert torch.equal(block_values(q, scale), values(weight, byte))
    assert torch.equal(torch.signbit(q.cpu().float()), torch.signbit(values(weight, byte)))


def test_beyond_that_the_least_value_rounds(device) -> None:
    weight = torch.full((1, 32), 0x11, dtype=torch.uint8, device=device)  # 0.5
    byte = torch.tensor([[127, 113]], dtype=torch.uint8, device=device)
    assert int(bits(convert(weight, byte)[0])[0, 40]) == 1
    byte[0, 1] = 112  # half a step, a tie to zero
    assert int(bits(convert(weight, byte)[0])[0, 40]) == 0
    byte[0, 1] = 0
    assert int(bits(convert(weight, byte)[0])[0, 40]) == 0


@pytest.mark.parametrize("byte", [0, 1, 5, 6, 7, 254])
def test_scales_at_the_ends(device, byte: int) -> None:
    weight = codes((16, 16), device)
    scale = torch.full((16, 1), byte, dtype=torch.uint8, device=device)
    q, found = convert(weight, scale)
    assert int(found) == max(byte - 6, 0)
    assert torch.equal(block_values(q, found), values(weight, scale))


def test_nan_poisons_its_group_only(device) -> None:
    weight = codes((130, 64), device)
    byte = spread_bytes(130, 4, 6, device)
    clean_q, clean_scale = convert(weight, byte)
    byte[3, 2] = 255
    q, scale = convert(weight, byte)
    assert (bits(q)[3, 64:96] == 0x7F).all() and same_bits(scale, clean_scale)
    fixed = q.view(torch.uint8).clone()
    fixed[3, 64:96] = clean_q.view(torch.uint8)[3, 64:96]
    assert same_bits(fixed.view(F8), clean_q)
    assert (bits(convert(weight, torch.full_like(byte, 255))[0]) == 0x7F).all()


@pytest.mark.parametrize("value", [3.0, -1.0, float("inf"), float("nan"), 2.0**-128])
def test_float_scales_that_are_no_power_of_two_are_nan(device, value: float) -> None:
    weight = codes((2, 32), device)
    scale = torch.tensor([[1.0, value], [0.5, 0.0]], device=device)
    q, block = convert(weight, scale)
    assert (bits(q)[0, 32:] == 0x7F).all() and int(block) == 121
    assert not q[1].float().isnan().any() and not q[0, :32].float().isnan().any()


def test_views_and_experts_do_not_matter(device) -> None:
    weight = codes((2, 140, 67), device).view(torch.int8)
    byte = torch.stack([spread_bytes(140, 5, 6, device), spread_bytes(140, 5, 9, device)])
    q, scale = convert(weight, byte)
    for view in (strided(weight), misaligned(weight), weight.view(torch.uint8)):
        found_q, found = convert(view, strided(byte))
        assert same_bits(found_q, q) and same_bits(found, scale)
    one_q, one = convert(weight[1], byte[1])
    assert same_bits(q[1], one_q) and same_bits(scale[1], one)


def test_quantising_the_result_of_a_round_trip(device) -> None:
    """MXFP4 from numbers that it holds, to block FP8: nothing is lost on the way."""
    weight = codes((128, 64), device)
    weight[:, ::16] = 0x7F  # a 6 in each group fixes its exponent
    byte = spread_bytes(128, 4, 6, device)
    exact = values(weight, byte)
    q4, found = torch.ops.dgmoe.quant_mxfp4(exact.float().to(device))
    assert same_bits(found, byte) and same_bits(q4.view(torch.uint8), weight)
    assert torch.equal(block_values(*convert(q4, found)), exact)


def test_refusals(device) -> None:
    weight = codes((2, 140, 68), device)
    scale = torch.zeros(2, 140, 5, dtype=torch.uint8, device=device)
    for bad in (weight.float(), weight.int(), weight[0, 0], weight[None]):
        with refused(NAME, "weight"):
            convert(bad, scale)
    wrong_grid = scale[:, :2, :2]
    for bad in (scale.int(), scale.bfloat16(), scale[0], scale[:1], scale[..., :4], wrong_grid):
        with refused(NAME, "scale"):
            convert(weight, bad)
