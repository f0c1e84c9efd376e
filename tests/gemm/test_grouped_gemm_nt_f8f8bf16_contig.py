import pytest
import torch
from gemm_cases import EXPERTS, M, N, case
from helpers import F8, bits, check_random, mn_major, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

NAME = "grouped_gemm_nt_f8f8bf16_contig"
gemm = getattr(torch.ops.dgmoe, NAME)


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def run(c, **changed):
    args = {"a": c.a.flatten(0, 1), "a_scale": mn_major(c.a_scale.flatten(0, 1))}
    args |= {"b": c.b, "b_scale": c.b_scale, "m_indices": c.m_indices} | changed
    return gemm(**args)


def test_exact_numbers(device) -> None:
    c = case(device, F8)
    d = run(c)
    assert d.shape == (EXPERTS * M, N) and d.dtype == torch.bfloat16 and d.is_contiguous()
    valid = c.m_indices >= 0
    assert same_bits(d[valid] + 0.0, c.expected(True).flatten(0, 1)[valid] + 0.0)


def test_every_scale_layout(device) -> None:
    if device.type == "cuda":
        pytest.skip("a GPU takes the one form that its DeepGEMM takes")
    c = case(device, F8)
    valid = c.m_indices >= 0
    expected = run(c)[valid]
    flat = c.a_scale.flatten(0, 1)
    forms = [flat, strided(flat), torch.ops.dgmoe.pack_ue8m0(flat)]
    for a_scale in forms:
        assert same_bits(run(c, a_scale=a_scale)[valid], expected)
    by_row = torch.ops.dgmoe.pack_ue8m0(c.b_scale.repeat_interleave(128, 1)[:, :N])
    assert same_bits(run(c, b_scale=by_row)[valid], expected)


def test_agrees_with_the_masked_layout(device) -> None:
    c = case(device, F8)
    masked = torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_masked(
        c.a, mn_major(c.a_scale), c.b, c.b_scale, c.masked_m, 45
    )
    assert same_bits(run(c)[c.m_indices >= 0], masked[c.valid()])


def test_padding_reaches_no_result(device) -> None:
    c = case(device, F8)
    valid = c.m_indices >= 0
    expected = run(c)[valid]
    a, a_scale = bits(c.a.flatten(0, 1)).to(device), mn_major(c.a_scale.flatten(0, 1))
    a[~valid] = 0x7F
    a_scale[~valid] = float("nan")
    assert same_bits(run(c, a=a.view(F8), a_scale=a_scale)[valid], expected)


@pytest.mark.parametrize(
    "shape", [(1, 0, 8, 128), (0, 0, 8, 128), (2, 128, 0, 128), (2, 128, 8, 0)]
)
def test_empty(device, shape) -> None:
    experts, m, n, k = shape
    a = torch.zeros(m, k, device=device).to(F8)
    b = torch.zeros(experts, n, k, device=device).to(F8)
    groups = -(-k // 128)
    a_scale = mn_major(torch.ones(m, groups, device=device))
    b_scale = torch.ones(experts, -(-n // 128), groups, device=device)
    d = gemm(a, a_scale, b, b_scale, torch.zeros(m, dtype=torch.int32, device=device))
    assert d.shape == (m, n)
    assert k > 0 or (d == 0).all()


def test_refusals(device) -> None:
    c = case(device, F8)
    a, a_scale = c.a.flatten(0, 1), c.a_scale.flatten(0, 1)
    for arg, bad in [
        ("a", a.bfloat16()),
        ("a", c.a),
        ("a", strided(a.view(torch.uint8)).view(F8)),
        ("b", c.b.bfloat16()),
        ("b", c.b[0]),
        ("b", c.b[..., :128].contiguous()),
        ("a_scale", a_scale.half()),
        ("a_scale", c.a_scale),
        ("a_scale", a_scale[:, :2]),
        ("b_scale", c.b_scale[:, :1]),
        ("b_scale", c.b_scale[:2]),
        ("m_indices", c.m_indices.long()),
        ("m_indices", c.m_indices[:-1]),
        ("m_indices", strided(c.m_indices)),
    ]:
        with refused(NAME, arg):
            run(c, **{arg: bad})
    with refused(NAME, "recipe_a"):
        run(c, recipe_b=[128, 128])
