import pytest
import torch
from gemm_cases import integers
from helpers import F8, bits, check_random, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

NAME = "gemm_nt_mxfp8_f8f8bf16"
gemm = getattr(torch.ops.dgmoe, NAME)
pack = torch.ops.dgmoe.pack_ue8m0


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def operand(rows: int, k: int, seed: int, device):
    """e4m3 integers, scales 2^-3 .. 2^3 a group: every sum of products is exact in fp32."""
    g = torch.Generator().manual_seed(seed)
    powers = torch.randint(-3, 4, (rows, -(-k // 32)), generator=g).float()
    return integers((rows, k), g).to(F8).to(device), torch.exp2(powers).to(device)


def expected(a, a_scale, b, b_scale) -> torch.Tensor:
    wide = [
        q.double() * scale.double().repeat_interleave(32, -1)[:, : q.shape[1]]
        for q, scale in ((a, a_scale), (b, b_scale))
    ]
    return (wide[0] @ wide[1].T).bfloat16()


@pytest.mark.parametrize("m", [0, 1, 7, 64, 129])
@pytest.mark.parametrize("n", [1, 24, 130])
@pytest.mark.parametrize("k", [1, 32, 100, 384])
def test_exact_numbers(device, m, n, k) -> None:
    if device.type == "cuda" and (n % 8 or k % 128):
        pytest.skip("a GPU takes whole tiles")
    a, a_scale = operand(m, k, 0, device)
    b, b_scale = operand(n, k, 1, device)
    d = gemm(a, pack(a_scale), b, pack(b_scale))
    assert d.shape == (m, n) and d.dtype == torch.bfloat16 and d.is_contiguous()
    assert same_bits(d + 0.0, expected(a, a_scale, b, b_scale) + 0.0)


@pytest.mark.parametrize("m", [7, 129])
def test_every_scale_layout(device, m) -> None:
    if device.type == "cuda":
        pytest.skip("a GPU takes the one form that its DeepGEMM takes")
    a, a_scale = operand(m, 300, 0, device)
    b, b_scale = operand(40, 300, 1, device)
    want = gemm(a, a_scale, b, b_scale)

    def forms(scale):
        packed = pack(scale)
        return (scale, scale.t().contiguous().t(), strided(scale), packed, strided(packed))

    for one in forms(a_scale):
        for other in forms(b_scale):
            assert same_bits(gemm(a, one, b, other), want)


def test_bytes_past_the_last_group_are_not_read(device) -> None:
    if device.type == "cuda":
        pytest.skip("a GPU multiplies whole words")
    a, a_scale = operand(7, 288, 0, device)
    b, b_scale = operand(40, 288, 1, device)
    a_packed, b_packed = pack(a_scale).contiguous(), pack(b_scale).contiguous()
    want = gemm(a, a_packed, b, b_packed)
    for packed in (a_packed, b_packed):
        packed.view(torch.uint8)[:, 9:] = 255
    assert same_bits(gemm(a, a_packed, b, b_packed), want)


def test_a_broken_scale_stays_in_its_row_or_column(device) -> None:
    a, a_scale = operand(7, 384, 0, device)
    b, b_scale = operand(24, 384, 1, device)
    want = gemm(a, pack(a_scale), b, pack(b_scale))
    a_scale[3, 5] = float("nan")
    d = gemm(a, pack(a_scale), b, pack(b_scale))
    assert d[3].isnan().all()
    d[3] = want[3]
    assert same_bits(d, want)
    a_scale[3, 5] = 1.0
    b_scale[20, 0] = float("inf")
    assert gemm(a, pack(a_scale), b, pack(b_scale)).isnan().all(0).nonzero().tolist() == [[20]]


def test_is_the_block_gemm_with_its_recipe(device) -> None:
    if device.type == "cuda":
        pytest.skip("SM90's DeepGEMM takes groups of 128 only")
    a, a_scale = operand(9, 200, 0, device)
    b, b_scale = operand(24, 200, 1, device)
    other = torch.ops.dgmoe.gemm_nt_f8f8bf16(
        a, a_scale, b, b_scale, recipe_a=[1, 32], recipe_b=[1, 32]
    )
    assert same_bits(gemm(a, a_scale, b, b_scale), other)


@pytest.mark.parametrize("shape", [(0, 8, 128), (5, 0, 128), (5, 8, 0), (0, 0, 0)])
def test_empty(device, shape) -> None:
    m, n, k = shape
    a, b = (torch.zeros(rows, k, device=device).to(F8) for rows in (m, n))
    words = -(-k // 128)
    a_scale, b_scale = (
        torch.zeros((rows, words), dtype=torch.int32, device=device) for rows in (m, n)
    )
    d = gemm(a, a_scale, b, b_scale)
    assert d.shape == (m, n) and not bits(d).any()


def test_refusals(device) -> None:
    a, a_scale = operand(6, 256, 0, device)
    b, b_scale = operand(24, 256, 1, device)
    good = {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale}
    for arg, bad in [
        ("a", a.bfloat16()),
        ("a", a[None]),
        ("a", strided(a.view(torch.uint8)).view(F8)),
        ("b", b.float()),
        ("b", b[None]),
        ("b", b[:, :128].contiguous()),
        ("a_scale", a_scale.double()),
        ("a_scale", a_scale[:, :2]),
        ("a_scale", a_scale[:5]),
        ("a_scale", a_scale.int()),
        ("a_scale", pack(a_scale)[:, :1]),
        ("b_scale", b_scale[:, :2]),
        ("b_scale", b_scale[:1]),
        ("b_scale", b_scale[None]),
        ("b_scale", pack(b_scale)[:, :1]),
    ]:
        with refused(NAME, arg):
            gemm(**(good | {arg: bad}))
