import pytest
import torch
from gemm_cases import EXPERTS, N, case
from helpers import BF16, bits, check_random, misaligned, random_bf16, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

from dgmoe_ops.testing import compare

NAME = "gemm_nt_bf16bf16f32"
gemm = getattr(torch.ops.dgmoe, NAME)
E = EXPERTS - 1


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


@pytest.mark.parametrize("m", [0, 1, 7, 64, 127, 128, 129, 256])
def test_exact_numbers(device, m) -> None:
    c = case(device, BF16)
    d = gemm(c.a[E, :m], c.b[E])
    assert d.shape == (m, N) and d.dtype == torch.float32 and d.is_contiguous()
    assert torch.equal(d, (c.a[E, :m].double() @ c.b[E].double().T).float())


@pytest.mark.parametrize("m", [1, 129, 1100])
def test_results_are_not_rounded_to_bf16(device, m) -> None:
    """257 and the square of 1 + 2^-7 need more bits than bf16 has."""
    a, b = torch.ones((m, 320), device=device), torch.ones((8, 320), device=device)
    a[:, 257:] = 0.0
    b[1] = 0.0
    a[:, 0] = b[1, 0] = 1.0 + 2.0**-7
    d = gemm(a.to(BF16), b.to(BF16))
    assert (d[:, 0] == 257.0 + 2.0**-7).all()
    assert (d[:, 1] == 1.0 + 2.0**-6 + 2.0**-14).all()


@pytest.mark.parametrize("m", [64, 200])
def test_rounds_to_the_grouped_one(device, m) -> None:
    """Of one expert: the same sums, without the last rounding."""
    if device.type == "cuda":
        pytest.skip("another kernel may add in another order")
    a, b = random_bf16((m, 300), device), random_bf16((72, 300), device, 1)
    where = torch.zeros(m, dtype=torch.int32, device=device)
    grouped = torch.ops.dgmoe.grouped_gemm_nt_bf16_contig(a, b[None], where)
    assert same_bits(gemm(a, b).bfloat16(), grouped)


@pytest.mark.parametrize("m", [3, 130])
def test_misaligned_operands(device, m) -> None:
    if device.type == "cuda":
        pytest.skip("DeepGEMM wants 16 bytes")
    a, b = random_bf16((m, 65), device), random_bf16((9, 65), device, 1)
    assert same_bits(gemm(misaligned(a), misaligned(b)), gemm(a, b))


def test_nan_stays_in_its_row_and_column(device) -> None:
    a, b = random_bf16((200, 128), device), random_bf16((24, 128), device, 1)
    for m in (64, 200):
        want = gemm(a[:m], b)
        broken_a, broken_b = a[:m].clone(), b.clone()
        broken_a[7, 3], broken_b[20, 9] = float("nan"), float("nan")
        d = gemm(broken_a, broken_b)
        assert d[7].isnan().all() and d[:, 20].isnan().all()
        d[7], d[:, 20] = want[7], want[:, 20]
        assert same_bits(d, want)


def test_bits_do_not_depend_on_the_row_count(device, monkeypatch) -> None:
    if device.type == "cuda":
        pytest.skip("DeepGEMM chooses its tiles by the row count")
    monkeypatch.setenv("DGMOE_BATCH_INVARIANT", "1")
    a, b = random_bf16((1100, 192), device), random_bf16((40, 192), device, 1)
    whole = gemm(a, b)
    for m in (1, 5, 64, 127, 128, 300):
        assert same_bits(gemm(a[:m], b), whole[:m])


@pytest.mark.parametrize("shape", [(0, 8, 128), (5, 0, 128), (5, 8, 0), (200, 8, 0), (0, 0, 0)])
def test_empty(device, shape) -> None:
    m, n, k = shape
    a, b = (torch.zeros((rows, k), dtype=BF16, device=device) for rows in (m, n))
    d = gemm(a, b)
    assert d.shape == (m, n) and not bits(d).any()


@pytest.mark.parametrize("m", [1, 127, 128, 300])
def test_bound_at_every_row_count(device, m) -> None:
    a, b = random_bf16((m, 320), device, m), random_bf16((72, 320), device, 1)
    compare.check(NAME, (a, b), {})


def test_refusals(device) -> None:
    a, b = random_bf16((6, 64), device), random_bf16((24, 64), device)
    for arg, bad in [
        ("a", a.float()),
        ("a", a[None]),
        ("a", strided(a)),
        ("b", b.half()),
        ("b", b[0]),
        ("b", b[:, :32].contiguous()),
        ("b", b.t().contiguous().t()),
    ]:
        with refused(NAME, arg):
            gemm(**({"a": a, "b": b} | {arg: bad}))
