import pytest
import torch
from gemm_cases import EXPERTS, N, case
from helpers import F8, bits, check_random, mn_major, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

from dgmoe_ops.testing import compare

NAME = "gemm_nt_f8f8bf16"
gemm = getattr(torch.ops.dgmoe, NAME)
pack = torch.ops.dgmoe.pack_ue8m0
E = EXPERTS - 1  # the slab that serves as a dense operand


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def run(c, rows=None, **changed):
    args = {"a": c.a[E][:rows], "a_scale": mn_major(c.a_scale[E][:rows])}
    args |= {"b": c.b[E], "b_scale": c.b_scale[E]} | changed
    return gemm(**args)


@pytest.mark.parametrize("m", [0, 1, 7, 64, 127, 128, 129, 256])
def test_exact_numbers(device, m) -> None:
    c = case(device, F8)
    d = run(c, m)
    assert d.shape == (m, N) and d.dtype == torch.bfloat16 and d.is_contiguous()
    assert same_bits(d + 0.0, c.expected(True)[E, :m] + 0.0)


def test_many_rows(device) -> None:
    """More than the CPU widens at a time."""
    c = case(device, F8)
    a, a_scale = c.a[E].repeat(5, 1), mn_major(c.a_scale[E].repeat(5, 1))
    d = run(c, a=a, a_scale=a_scale)
    assert same_bits(d + 0.0, c.expected(True)[E].repeat(5, 1) + 0.0)


@pytest.mark.parametrize("m", [7, 129])
def test_every_scale_layout(device, m) -> None:
    if device.type == "cuda":
        pytest.skip("a GPU takes the one form that its DeepGEMM takes")
    c = case(device, F8)
    expected, a_scale = run(c, m), c.a_scale[E][:m]
    for form in (a_scale, strided(a_scale), pack(a_scale), strided(pack(a_scale))):
        assert same_bits(run(c, m, a_scale=form), expected)
    by_row = c.b_scale[E].repeat_interleave(128, 0)[:N]
    for form in (pack(by_row), strided(pack(by_row))):
        assert same_bits(run(c, m, b_scale=form), expected)
    assert same_bits(run(c, m, b_scale=strided(c.b_scale[E])), expected)
    rows = {"recipe_a": [1, 128], "recipe_b": [1, 128]}
    assert same_bits(run(c, m, b_scale=by_row, **rows), expected)


def test_groups_of_32(device) -> None:
    if device.type == "cuda":
        pytest.skip("SM90's DeepGEMM takes groups of 128 only")
    c = case(device, F8)
    fine = {"a_scale": c.a_scale[E].repeat_interleave(4, -1), "recipe_a": [1, 32]}
    d = run(c, **fine, b_scale=c.b_scale[E], recipe_b=[128, 128])
    assert same_bits(d + 0.0, c.expected(True)[E] + 0.0)


@pytest.mark.parametrize("m", [64, 200])
def test_is_the_grouped_one_of_one_expert(device, m) -> None:
    if device.type == "cuda":
        m = -(-m // 128) * 128  # DeepGEMM takes whole segments
    c = case(device, F8)
    a, a_scale = c.a[E][:m], mn_major(c.a_scale[E][:m])
    where = torch.zeros(m, dtype=torch.int32, device=device)
    grouped = torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_contig(
        a, a_scale, c.b[E][None], c.b_scale[E][None], where
    )
    assert same_bits(run(c, m), grouped)


def test_every_code_is_decoded(device) -> None:
    """Each e4m3 value times one: the NaN codes poison their row and no other."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    a = torch.zeros((256, 128), dtype=torch.uint8, device=device)
    a[:, 5] = codes
    b = torch.zeros((128, 128), device=device)
    b[:, 5] = 1.0
    ones = torch.ones((256, 1), device=device)
    d = gemm(a.view(F8), mn_major(ones), b.to(F8), torch.ones((1, 1), device=device))
    want = codes.view(F8).to(torch.bfloat16)
    broken = want.isnan()
    assert d[broken].isnan().all() and int(broken.sum()) == 2
    assert torch.equal(d[~broken], want[~broken, None].expand(-1, 128))


def test_nan_scale_stays_in_its_row(device) -> None:
    c = case(device, F8)
    for m in (64, 200):
        expected, a_scale = run(c, m), c.a_scale[E][:m].clone()
        a_scale[7, 1] = float("nan")
        d = run(c, m, a_scale=mn_major(a_scale))
        assert d[7].isnan().all()
        d[7] = expected[7]
        assert same_bits(d, expected)


@pytest.mark.parametrize("shape", [(0, 8, 128), (5, 0, 128), (5, 8, 0), (200, 8, 0), (0, 0, 0)])
def test_empty(device, shape) -> None:
    m, n, k = shape
    a, b = (torch.zeros(rows, k, device=device).to(F8) for rows in (m, n))
    groups = -(-k // 128)
    a_scale = mn_major(torch.ones(m, groups, device=device))
    d = gemm(a, a_scale, b, torch.ones(-(-n // 128), groups, device=device))
    assert d.shape == (m, n) and not bits(d).any()


@pytest.mark.parametrize("m", [1, 127, 128, 300])
def test_bound_at_every_row_count(device, m) -> None:
    g = torch.Generator().manual_seed(m)
    x, w = torch.randn(m, 192, generator=g), torch.randn(72, 192, generator=g)
    a, a_scale = torch.ops.dgmoe.quant_group_fp8(x.to(device), 128, 1)
    b, b_scale = torch.ops.dgmoe.quant_block_fp8(w.to(device))
    compare.check(NAME, (a, a_scale, b, b_scale), {})


def test_refusals(device) -> None:
    c = case(device, F8)
    a, a_scale, b, b_scale = c.a[E], c.a_scale[E], c.b[E], c.b_scale[E]
    for arg, bad in [
        ("a", a.bfloat16()),
        ("a", a[None]),
        ("a", strided(a.view(torch.uint8)).view(F8)),
        ("b", b.bfloat16()),
        ("b", b[None]),
        ("b", b[:, :128].contiguous()),
        ("b", strided(b.view(torch.uint8)).view(F8)),
        ("a_scale", a_scale.half()),
        ("a_scale", a_scale[None]),
        ("a_scale", a_scale[:, :2]),
        ("a_scale", a_scale[:5]),
        ("b_scale", b_scale.half()),
        ("b_scale", b_scale[None]),
        ("b_scale", b_scale[:1]),
        ("b_scale", b_scale[:, :1]),
        ("b_scale", b_scale.int()),
    ]:
        with refused(NAME, arg):
            run(c, **{arg: bad})
    for recipe_a, recipe_b, arg in [
        ([1, 128], None, "recipe_a"),
        (None, [128, 128], "recipe_a"),
        ([128, 128], [128, 128], "recipe_a"),
        ([1, 64], [128, 128], "recipe_a"),
        ([1, 128], [128], "recipe_b"),
        ([1, 128], [2, 128], "recipe_b"),
    ]:
        with refused(NAME, arg):
            run(c, recipe_a=recipe_a, recipe_b=recipe_b)
