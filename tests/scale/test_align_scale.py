import pytest
import torch
from helpers import check_random, mn_major, refused, same_bits, storage_words, strided
from hypothesis import given
from hypothesis.strategies import data

align = torch.ops.dgmoe.align_scale
NAME = "align_scale"
ONE = 0x3F800000


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_worked_layout(device) -> None:
    scale = torch.tensor([[2.0, 4.0], [8.0, 16.0], [32.0, 64.0]], device=device)
    out = align(scale)
    assert out.shape == (3, 2) and out.stride() == (1, 4) and torch.equal(out, scale)
    exponents = [word >> 23 for word in storage_words(out)]
    assert exponents == [128, 130, 132, 127, 129, 131, 133, 127]
    assert storage_words(out)[3] == storage_words(out)[7] == ONE


def test_never_an_alias(device) -> None:
    scale = mn_major(torch.rand(8, 3, device=device))
    assert scale.stride() == (1, 8)
    assert align(scale).data_ptr() != scale.data_ptr()


def test_every_bit_survives(device) -> None:
    scale = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-45, -3.5]], device=device)
    assert same_bits(align(scale), scale)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (2, 5, 9), (2, 0, 4), (0, 5, 4)])
def test_shapes(device, shape) -> None:
    scale = torch.rand(shape, device=device)
    out = align(scale)
    assert out.stride()[-2:] == (1, -(-shape[-2] // 4) * 4)
    assert same_bits(out, scale)


def test_strides_do_not_matter(device) -> None:
    scale = torch.rand(2, 5, 6, device=device)
    assert same_bits(align(strided(scale)), scale)
    assert same_bits(align(scale.transpose(1, 2)), scale.transpose(1, 2))


def test_refusals(device) -> None:
    for scale in (torch.ones(2, 2, dtype=torch.int32), torch.ones(2), torch.ones(1, 1, 1, 1)):
        with refused(NAME, "scale"):
            align(scale.to(device))
