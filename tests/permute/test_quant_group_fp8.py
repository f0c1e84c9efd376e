import pytest
import torch
from helpers import bits, check_random, misaligned, random_bf16, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

quant = torch.ops.dgmoe.quant_group_fp8
unpack = torch.ops.dgmoe.unpack_ue8m0
NAME = "quant_group_fp8"
INF, NAN = float("inf"), float("nan")


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


@pytest.mark.parametrize(
    ("amax", "exponent", "code"),
    [
        (0.0, 85, 0x00),
        (1e-4, 105, 0x7D),
        (0.5, 118, 0x78),
        (1.0, 119, 0x78),
        (1.75, 119, 0x7E),
        (1.7578125, 120, 0x76),
        (448.0, 127, 0x7E),
        (450.0, 128, 0x76),
        (3.38953139e38, 247, 0x78),
    ],
)
@pytest.mark.parametrize("group_size", [32, 128])
def test_worked_groups(device, amax: float, exponent: int, code: int, group_size: int) -> None:
    x = torch.zeros(1, group_size, device=device)
    x[0, 7] = -amax
    q, packed = quant(x, group_size, 2)
    assert int(packed) == exponent
    assert int(bits(q)[0, 7]) == (code | 0x80)
    rounded, scale = quant(x, group_size, 0, True)
    assert float(scale) == 2.0 ** (exponent - 127) and same_bits(rounded, q)


def test_fp32_scale_is_a_product(device) -> None:
    x = torch.tensor([[3.0, -1.0]], device=device)
    q, scale = quant(x, 128, 0)
    inverse = torch.tensor(0x3B124925, dtype=torch.int32).view(torch.float32)
    assert same_bits(scale.cpu(), (torch.tensor(3.0) * inverse).reshape(1, 1))
    assert q.float().tolist() == [[448.0, -144.0]]


def test_the_forms_agree(device) -> None:
    x = random_bf16((5, 416), device)
    q, scale = quant(x, 128, 0, True)
    for form in (1, 2):
        again, other = quant(x, 128, form, True)
        assert same_bits(again, q)
        assert same_bits(unpack(other, 4) if form == 2 else other, scale)
        assert other.stride() == (1, 8)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("form", [0, 1, 2])
def test_non_finite_poisons_its_group_only(device, bad: float, form: int) -> None:
    x = random_bf16((3, 256), device)
    clean_q, clean_scale = quant(x, 128, form)
    x[1, 200] = bad
    q, scale = quant(x, 128, form)
    assert ((bits(q)[1, 128:] & 0x7F) == 0x7F).all()
    q[1, 128:] = clean_q[1, 128:]
    assert same_bits(q, clean_q)
    values, clean = (unpack(s, 2) if form == 2 else s for s in (scale, clean_scale))
    assert values[1, 1].isnan()
    values[1, 1] = clean[1, 1]
    assert same_bits(values, clean)


@pytest.mark.parametrize(("k", "padded_k"), [(1, 128), (100, 128), (128, 256), (130, 131), (0, 64)])
@pytest.mark.parametrize("form", [0, 2])
def test_padding_columns_are_zero(device, k: int, padded_k: int, form: int) -> None:
    x = random_bf16((3, k), device)
    q, scale = quant(x, 32, form, False, padded_k)
    assert q.shape == (3, padded_k)
    assert not bits(q[:, k:]).any()
    wide = torch.zeros(3, padded_k, dtype=torch.bfloat16, device=device)
    wide[:, :k] = x
    whole, whole_scale = quant(wide, 32, form)
    assert same_bits(q, whole) and same_bits(scale, whole_scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_views_do_not_matter(device, dtype) -> None:
    x = random_bf16((6, 200), device).to(dtype)
    expected = quant(x, 128, 2)
    for view in (strided(x), misaligned(x), x.t().contiguous().t()):
        assert torch.equal(view, x)
        for found, wanted in zip(quant(view, 128, 2), expected, strict=True):
            assert same_bits(found, wanted)
    row = quant(x[:1].expand(6, 200), 128, 2)
    assert same_bits(row[0][5], expected[0][0])


def test_bf16_and_float32_agree(device) -> None:
    x = random_bf16((4, 300), device)
    for a, b in zip(quant(x, 32, 1), quant(x.float(), 32, 1), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("shape", [(0, 128), (4, 0), (0, 0)])
@pytest.mark.parametrize("form", [0, 1, 2])
def test_empty(device, shape, form: int) -> None:
    q, scale = quant(torch.zeros(shape, device=device), 128, form)
    groups = -(-shape[1] // 128)
    assert q.shape == shape
    assert scale.shape == (shape[0], -(-groups // 4) if form == 2 else groups)


def test_refusals(device) -> None:
    x = torch.zeros(2, 128, device=device)
    for bad in (x.half(), x.double(), x[0], x[None]):
        with refused(NAME, "x"):
            quant(bad, 128, 0)
    for group_size in (0, 64, -128):
        with refused(NAME, "group_size"):
            quant(x, group_size, 0)
    for form in (-1, 3):
        with refused(NAME, "scale_layout"):
            quant(x, 128, form)
    with refused(NAME, "padded_k"):
        quant(x, 128, 0, False, 127)
