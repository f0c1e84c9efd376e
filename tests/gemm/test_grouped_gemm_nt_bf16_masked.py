import pytest
import torch
from gemm_cases import EXPERTS, M, N, case
from helpers import BF16, check_random, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

NAME = "grouped_gemm_nt_bf16_masked"
gemm = torch.ops.dgmoe.grouped_gemm_nt_bf16_masked


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_exact_numbers(device) -> None:
    c = case(device, BF16)
    d = gemm(c.a, c.b, c.masked_m, 45)
    assert d.shape == (EXPERTS, M, N) and d.dtype == BF16 and d.is_contiguous()
    assert same_bits(d[c.valid()] + 0.0, c.expected(False)[c.valid()] + 0.0)


def test_padding_reaches_no_result(device) -> None:
    c = case(device, BF16)
    expected = gemm(c.a, c.b, c.masked_m, 45)[c.valid()]
    c.a[~c.valid()] = float("nan")
    assert same_bits(gemm(c.a, c.b, c.masked_m, 1)[c.valid()], expected)


@pytest.mark.parametrize("shape", [(0, 8, 8, 16), (2, 0, 8, 16), (2, 4, 0, 16), (2, 4, 8, 0)])
def test_empty(device, shape) -> None:
    experts, m, n, k = shape
    a = torch.zeros(experts, m, k, dtype=BF16, device=device)
    b = torch.zeros(experts, n, k, dtype=BF16, device=device)
    d = gemm(a, b, torch.full((experts,), m, dtype=torch.int32, device=device), 1)
    assert d.shape == (experts, m, n)
    assert k > 0 or (d == 0).all()


def test_refusals(device) -> None:
    c = case(device, BF16)
    good = {"a": c.a, "b": c.b, "masked_m": c.masked_m, "expected_m": 1}
    for arg, bad in [
        ("a", c.a.float()),
        ("a", c.a[0]),
        ("a", strided(c.a)),
        ("b", c.b.float()),
        ("b", c.b[:2]),
        ("b", strided(c.b)),
        ("masked_m", c.masked_m.long()),
        ("masked_m", c.masked_m[:2]),
        ("masked_m", strided(c.masked_m)),
        ("expected_m", 0),
        ("expected_m", 2**31),
    ]:
        with refused(NAME, arg):
            gemm(**(good | {arg: bad}))
