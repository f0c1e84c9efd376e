import pytest
import torch
from gemm_cases import EXPERTS, M, N, case
from helpers import BF16, check_random, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

NAME = "grouped_gemm_nt_bf16_contig"
gemm = torch.ops.dgmoe.grouped_gemm_nt_bf16_contig


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_exact_numbers(device) -> None:
    c = case(device, BF16)
    d = gemm(c.a.flatten(0, 1), c.b, c.m_indices)
    assert d.shape == (EXPERTS * M, N) and d.dtype == BF16 and d.is_contiguous()
    valid = c.m_indices >= 0
    assert same_bits(d[valid] + 0.0, c.expected(False).flatten(0, 1)[valid] + 0.0)


def test_padding_reaches_no_result(device) -> None:
    c = case(device, BF16)
    valid = c.m_indices >= 0
    a = c.a.flatten(0, 1).clone()
    expected = gemm(a, c.b, c.m_indices)[valid]
    a[~valid] = float("nan")
    assert same_bits(gemm(a, c.b, c.m_indices)[valid], expected)


def test_agrees_with_the_masked_layout(device) -> None:
    c = case(device, BF16)
    masked = torch.ops.dgmoe.grouped_gemm_nt_bf16_masked(c.a, c.b, c.masked_m, 45)
    d = gemm(c.a.flatten(0, 1), c.b, c.m_indices)
    assert same_bits(d[c.m_indices >= 0], masked[c.valid()])


@pytest.mark.parametrize("shape", [(1, 0, 8, 16), (0, 0, 8, 16), (2, 128, 0, 16), (2, 128, 8, 0)])
def test_empty(device, shape) -> None:
    experts, m, n, k = shape
    a = torch.zeros(m, k, dtype=BF16, device=device)
    b = torch.zeros(experts, n, k, dtype=BF16, device=device)
    d = gemm(a, b, torch.zeros(m, dtype=torch.int32, device=device))
    assert d.shape == (m, n)
    assert k > 0 or (d == 0).all()


def test_refusals(device) -> None:
    c = case(device, BF16)
    a = c.a.flatten(0, 1)
    good = {"a": a, "b": c.b, "m_indices": c.m_indices}
    for arg, bad in [
        ("a", a.float()),
        ("a", c.a),
        ("a", strided(a)),
        ("b", c.b.float()),
        ("b", c.b[0]),
        ("b", c.b[..., :128].contiguous()),
        ("b", strided(c.b)),
        ("m_indices", c.m_indices.long()),
        ("m_indices", c.m_indices[:-1]),
        ("m_indices", c.m_indices[None]),
        ("m_indices", strided(c.m_indices)),
    ]:
        with refused(NAME, arg):
            gemm(**(good | {arg: bad}))
