import pytest
import torch
from helpers import (
    BF16,
    bits,
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

silu_quant = torch.ops.dgmoe.silu_and_mul_post_quant_masked
NAME = "silu_and_mul_post_quant_masked"
MASKED_M = [130, 0, 7]


def slab(device) -> tuple[torch.Tensor, torch.Tensor]:
    return random_bf16((3, 256, 400), device), int32(MASKED_M, device)


def as_floats(scale: torch.Tensor, groups: int) -> torch.Tensor:
    packed = scale.dtype == torch.int32
    return torch.ops.dgmoe.unpack_ue8m0(scale, groups) if packed else scale


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


@pytest.mark.parametrize("form", [0, 1, 2])
@pytest.mark.parametrize("group_size", [32, 128])
def test_with_round_activation_it_is_its_parts(device, form: int, group_size: int) -> None:
    x, masked_m = slab(device)
    options = {"group_size": group_size, "scale_layout": form}
    q, scale = silu_quant(x, masked_m, round_activation=True, **options)
    product = torch.ops.dgmoe.silu_and_mul(x, masked_m)
    for e, count in enumerate(MASKED_M):
        want_q, want_scale = torch.ops.dgmoe.quant_group_fp8(product[e, :count], **options)
        assert same_bits(q[e, :count], want_q) and same_bits(scale[e, :count], want_scale)


@pytest.mark.parametrize("form", [0, 1, 2])
def test_padding_of_a_tile_has_scale_one(device, form: int) -> None:
    x, masked_m = slab(device)
    x[0, 130:], x[1], x[2, 7:] = float("nan"), float("nan"), float("nan")
    _, scale = silu_quant(x, masked_m, group_size=32, scale_layout=form)
    values = as_floats(scale, 7)
    assert (values[0, 130:256] == 1).all() and (values[2, 7:128] == 1).all()
    if form == 2:
        assert ((scale[2, :128, 1] >> 24) == 0).all(), "the missing byte of a word is zero"


def test_padding_reaches_no_result(device) -> None:
    x, masked_m = slab(device)
    q, scale = silu_quant(x, masked_m)
    for e, count in enumerate(MASKED_M):
        x[e, count:] = float("nan")
    poisoned_q, poisoned_scale = silu_quant(x, masked_m)
    for e, count in enumerate(MASKED_M):
        assert same_bits(poisoned_q[e, :count], q[e, :count])
        assert same_bits(poisoned_scale[e, :count], scale[e, :count])


@pytest.mark.parametrize("form", [1, 2])
def test_non_finite_poisons_its_group_only(device, form: int) -> None:
    x, masked_m = slab(device)
    clean_q, clean_scale = silu_quant(x, masked_m, scale_layout=form)
    x[0, 5, 3] = float("nan")
    q, scale = silu_quant(x, masked_m, scale_layout=form)
    assert as_floats(scale, 2)[0, 5, 0].isnan()
    assert ((bits(q)[0, 5, :128] & 0x7F) == 0x7F).all()
    assert same_bits(q[0, 5, 128:], clean_q[0, 5, 128:])
    keep = torch.arange(130) != 5
    assert same_bits(bits(q)[0, :130][keep], bits(clean_q)[0, :130][keep])
    assert same_bits(scale[0, :130].cpu()[keep], clean_scale[0, :130].cpu()[keep])


def test_views_do_not_matter(device) -> None:
    x, masked_m = slab(device)
    q, scale = silu_quant(x, masked_m, scale_layout=2)
    for view in (strided(x), misaligned(x), x.transpose(0, 1).contiguous().transpose(0, 1)):
        found_q, found_scale = silu_quant(view, masked_m, scale_layout=2)
        for e, count in enumerate(MASKED_M):
            assert same_bits(found_q[e, :count], q[e, :count])
            assert same_bits(found_scale[e, :count], scale[e, :count])


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
@pytest.mark.parametrize("form", [0, 1, 2])
def test_empty(device, shape, form: int) -> None:
    x = torch.zeros(shape, dtype=BF16, device=device)
    q, scale = silu_quant(x, int32([shape[1]] * shape[0], device), scale_layout=form)
    assert q.shape == (*shape[:-1], shape[-1] // 2)
    assert scale.shape == (*shape[:-1], min(1, shape[-1]))


def test_refusals(device) -> None:
    x, masked_m = random_bf16((2, 4, 8), device), int32([1, 2], device)
    for bad in (x.float(), x[0], x[..., :7]):
        with refused(NAME, "gate_up"):
            silu_quant(bad, masked_m)
    for bad in (masked_m.long(), masked_m[:1], masked_m[None], strided(masked_m)):
        with refused(NAME, "masked_m"):
            silu_quant(x, bad)
    for arg, value in [("group_size", 64), ("group_size", 0), ("scale_layout", 3)]:
        with refused(NAME, arg):
            silu_quant(x, masked_m, **{arg: value})
