import pytest
import torch
from gemm_cases import EXPERTS, M, N, case
from helpers import F8, bits, check_random, mn_major, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

NAME = "grouped_gemm_nt_f8f8bf16_masked"
gemm = getattr(torch.ops.dgmoe, NAME)


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def run(c, **changed):
    args = {
        "a": c.a,
        "a_scale": mn_major(c.a_scale),
        "b": c.b,
        "b_scale": c.b_scale,
        "masked_m": c.masked_m,
    }
    args |= {"expected_m": 45} | changed
    return gemm(**args)


def test_exact_numbers(device) -> None:
    c = case(device, F8)
    d = run(c)
    assert d.shape == (EXPERTS, M, N) and d.dtype == torch.bfloat16 and d.is_contiguous()
    assert same_bits(d[c.valid()] + 0.0, c.expected(True)[c.valid()] + 0.0)


def test_every_scale_layout(device) -> None:
    if device.type == "cuda":
        pytest.skip("a GPU takes the one form that its DeepGEMM takes")
    c = case(device, F8)
    expected = run(c)[c.valid()]
    forms = [c.a_scale, strided(c.a_scale), torch.ops.dgmoe.pack_ue8m0(c.a_scale)]
    for a_scale in forms:
        assert same_bits(run(c, a_scale=a_scale)[c.valid()], expected)
    by_row = torch.ops.dgmoe.pack_ue8m0(c.b_scale.repeat_interleave(128, 1)[:, :N])
    assert same_bits(run(c, b_scale=by_row)[c.valid()], expected)


def test_groups_of_32(device) -> None:
    if device.type == "cuda":
        pytest.skip("SM90's DeepGEMM takes groups of 128 only")
    c = case(device, F8)
    fine_a, fine_b = (s.repeat_interleave(4, -1) for s in (c.a_scale, c.b_scale))
    fine_b = fine_b.repeat_interleave(128, 1)[:, :N]
    for a_scale, b_scale in [
        (fine_a, fine_b),
        (torch.ops.dgmoe.pack_ue8m0(fine_a), torch.ops.dgmoe.pack_ue8m0(fine_b)),
    ]:
        d = run(c, a_scale=a_scale, b_scale=b_scale, recipe_a=[1, 32], recipe_b=[1, 32])
        assert same_bits(d[c.valid()] + 0.0, c.expected(True)[c.valid()] + 0.0)


def test_the_hint_is_only_a_hint(device) -> None:
    c = case(device, F8)
    expected = run(c)[c.valid()]
    for hint in (1, 10**6):
        assert same_bits(run(c, expected_m=hint)[c.valid()], expected)


def test_padding_reaches_no_result(device) -> None:
    c = case(device, F8)
    expected = run(c)[c.valid()]
    a, a_scale = bits(c.a).to(device), c.a_scale.clone()
    a[~c.valid()] = 0x7F
    a_scale[~c.valid()] = float("nan")
    assert same_bits(run(c, a=a.view(F8), a_scale=mn_major(a_scale))[c.valid()], expected)


def test_nan_scale_stays_in_its_row(device) -> None:
    c = case(device, F8)
    expected = run(c)
    c.a_scale[2, 7, 1] = float("nan")
    d = run(c)
    assert d[2, 7].isnan().all()
    d[2, 7] = expected[2, 7]
    assert same_bits(d[c.valid()], expected[c.valid()])


@pytest.mark.parametrize("shape", [(0, 8, 8, 128), (2, 0, 8, 128), (2, 4, 0, 128), (2, 4, 8, 0)])
def test_empty(device, shape) -> None:
    experts, m, n, k = shape
    a = torch.zeros(experts, m, k, device=device).to(F8)
    b = torch.zeros(experts, n, k, device=device).to(F8)
    groups = -(-k // 128)
    a_scale = torch.ones(experts, m, groups, device=device)
    b_scale = torch.ones(experts, -(-n // 128), groups, device=device)
    masked_m = torch.full((experts,), m, dtype=torch.int32, device=device)
    d = gemm(a, a_scale, b, b_scale, masked_m, 1)
    assert d.shape == (experts, m, n)
    assert k > 0 or (d == 0).all()


def test_refusals(device) -> None:
    c = case(device, F8)
    for arg, bad in [
        ("a", c.a.bfloat16()),
        ("a", c.a[0]),
        ("a", strided(c.a.view(torch.uint8)).view(F8)),
        ("b", c.b.bfloat16()),
        ("b", c.b[0]),
        ("b", c.b[:2]),
        ("b", c.b[..., :128].contiguous()),
        ("a_scale", c.a_scale.half()),
        ("a_scale", c.a_scale[0]),
        ("a_scale", c.a_scale[..., :2]),
        ("a_scale", c.a_scale[:2]),
        ("b_scale", c.b_scale.half()),
        ("b_scale", c.b_scale[0]),
        ("b_scale", c.b_scale[:, :1]),
        ("masked_m", c.masked_m.long()),
        ("masked_m", c.masked_m[:2]),
        ("masked_m", c.masked_m[None]),
        ("expected_m", 0),
        ("expected_m", 2**31),
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
