import struct

import pytest
import torch
from helpers import check_random, refused, same_bits, storage_words, strided
from hypothesis import given
from hypothesis.strategies import data

pack = torch.ops.dgmoe.pack_ue8m0
NAME = "pack_ue8m0"


def powers(exponents: torch.Tensor) -> torch.Tensor:
    return torch.pow(2.0, exponents.double() - 127).float()


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_worked_words(device) -> None:
    """Three rows of five groups: two words a row, slack and missing bytes as promised."""
    codes = torch.tensor([[0x10 * i + g for g in range(5)] for i in range(3)])
    codes[0, 0] = 1  # byte 0 only pads
    packed = pack(powers(codes).to(device))
    assert packed.shape == (3, 2) and packed.stride() == (1, 4)
    expected = [0x03020101, 0x13121110, 0x23222120, 0x7F7F7F7F, 0x04, 0x14, 0x24, 0x7F]
    assert storage_words(packed) == expected


@pytest.mark.parametrize(
    ("bits", "byte"),
    [
        (0x3F800000, 127),
        (0x3F800001, 128),
        (0x3FFFFFFF, 128),
        (0x00000000, 1),
        (0x80000000, 1),
        (0x80000001, 255),
        (0x00000001, 1),
        (0x007FFFFF, 1),
        (0x00800001, 2),
        (0x7F000000, 254),
        (0x7F7FFFFF, 254),
        (0x7F800000, 255),
        (0x7FC00000, 255),
        (0xBF800000, 255),
    ],
)
def test_rounds_up(device, bits: int, byte: int) -> None:
    scale = torch.tensor([[struct.unpack("<f", struct.pack("<I", bits))[0]]], device=device)
    assert int(pack(scale)) == byte


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (1, 1), (2, 5, 9), (2, 0, 4), (0, 5, 4)])
def test_shapes(device, shape) -> None:
    packed = pack(torch.ones(shape, device=device))
    mn, words = shape[-2], -(-shape[-1] // 4)
    assert packed.shape == (*shape[:-1], words) and packed.dtype == torch.int32
    assert packed.stride()[-2:] == (1, -(-mn // 4) * 4)


def test_batches_are_independent(device) -> None:
    scale = torch.rand(3, 5, 6, device=device)
    packed = pack(scale)
    for i in range(3):
        assert same_bits(packed[i], pack(scale[i]))


def test_strides_do_not_matter(device) -> None:
    scale = torch.rand(2, 5, 6, device=device)
    assert same_bits(pack(strided(scale)), pack(scale))
    assert same_bits(pack(scale.transpose(1, 2)), pack(scale.transpose(1, 2).contiguous()))
    assert same_bits(pack(scale[:1, :1].expand(2, 5, 6)), pack(scale[:1, :1].repeat(2, 5, 1)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_bytes_stay_as_they_are(device, dtype) -> None:
    """All 256 of them, there and back."""
    byte = torch.arange(256, dtype=torch.uint8, device=device).view(32, 8)
    packed = pack(byte.view(dtype))
    assert packed.shape == (32, 2) and packed.stride() == (1, 32)
    assert torch.equal(packed.contiguous().view(torch.uint8), byte)
    scale = torch.ops.dgmoe.unpack_ue8m0(packed, 8)
    assert torch.equal(pack(scale[:, 1:7]).cpu()[2:-1], pack(byte[:, 1:7]).cpu()[2:-1])
    turned = byte.t().contiguous().t()
    assert same_bits(pack(turned.view(dtype)), packed)


def test_refusals(device) -> None:
    for scale in (torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2), torch.ones(1, 1, 1, 1)):
        with refused(NAME, "scale"):
            pack(scale.to(device))
