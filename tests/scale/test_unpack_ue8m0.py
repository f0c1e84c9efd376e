import pytest
import torch
from helpers import check_random, int32, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

unpack = torch.ops.dgmoe.unpack_ue8m0
pack = torch.ops.dgmoe.pack_ue8m0
NAME = "unpack_ue8m0"


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_worked_word(device) -> None:
    scale = unpack(int32([[0x017F7E80]], device), 4)
    assert scale.tolist() == [[2.0, 0.5, 1.0, 2.0**-126]]


def test_every_byte(device) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int32).reshape(8, 8).to(device)
    scale = unpack(codes, 32).cpu().flatten()
    expected = torch.pow(2.0, torch.arange(255).double() - 127).float()
    assert torch.equal(scale[:255], expected)
    assert scale[255].isnan()


@pytest.mark.parametrize("groups", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("mn", [1, 3, 4, 5])
def test_undoes_pack(device, mn: int, groups: int) -> None:
    exponents = torch.randint(1, 255, (2, mn, groups)).double()
    scale = torch.pow(2.0, exponents - 127).float().to(device)
    unpacked = unpack(pack(scale), groups)
    assert same_bits(unpacked, scale) and unpacked.is_contiguous()
    assert same_bits(pack(unpacked), pack(scale))


def test_missing_bytes_are_not_read(device) -> None:
    clean, dirty = int32([[0x0000007F]], device), int32([[0x7E7E7E7F]], device)
    assert same_bits(unpack(clean, 1), unpack(dirty, 1))


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (0, 3, 1), (2, 0, 1)])
def test_empty(device, shape) -> None:
    packed = torch.zeros(shape, dtype=torch.int32, device=device)
    assert unpack(packed, 4 * shape[-1]).shape == (*shape[:-1], 4 * shape[-1])


def test_strides_do_not_matter(device) -> None:
    packed = torch.randint(0, 2**31 - 1, (2, 5, 3), dtype=torch.int32, device=device)
    assert same_bits(unpack(strided(packed), 11), unpack(packed, 11))
    turned = packed.transpose(1, 2)
    assert same_bits(unpack(turned, 17), unpack(turned.contiguous(), 17))


def test_refusals(device) -> None:
    packed = int32([[1, 2]], device)
    with refused(NAME, "packed"):
        unpack(packed.float(), 8)
    with refused(NAME, "packed"):
        unpack(packed[0], 8)
    for groups in (4, 9, 0):
        with refused(NAME, "packed"):
            unpack(packed, groups)
    with refused(NAME, "groups"):
        unpack(packed, -1)
