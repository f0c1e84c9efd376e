import pytest
import torch
from gemm_cases import integers
from helpers import BF16, bits, check_random, random_bf16, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data
from hypothesis.strategies import integers as numbers

NAME = "tf32_hc_prenorm_gemm"
gemm = getattr(torch.ops.dgmoe, NAME)


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def case(m: int, n: int, k: int, device, seed: int = 0):
    """Small integers and quarters, exact in TF32 and in every sum."""
    g = torch.Generator().manual_seed(seed)
    x = integers((m, k), g) * 3.0
    fn = torch.randint(-9, 10, (n, k), generator=g).float() / 4.0
    return x.to(BF16).to(device), fn.to(device)


def legal(device, n: int, k: int) -> None:
    if device.type == "cuda" and (n % 8 or k % 64):
        pytest.skip("a GPU takes whole tiles")


@pytest.mark.parametrize("m", [0, 1, 7, 64, 129])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (24, 64), (24, 576), (33, 300), (9, 129)])
def test_exact_numbers(device, m, n, k) -> None:
    legal(device, n, k)
    x, fn = case(m, n, k, device)
    out, sqr_sum = gemm(x, fn)
    assert out.shape == (m, n) and sqr_sum.shape == (m,)
    assert out.dtype == sqr_sum.dtype == torch.float32
    assert out.is_contiguous() and sqr_sum.is_contiguous()
    assert torch.equal(out, (x.double() @ fn.double().T).float())
    assert torch.equal(sqr_sum, x.double().square().sum(-1).float())


#: (k, num_splits) -> where each piece begins, and where the last one ends
PIECES = {
    (576, 1): [0, 576],
    (576, 2): [0, 320, 576],
    (576, 4): [0, 192, 320, 448, 576],
    (576, 5): [0, 128, 256, 384, 512, 576],
    (576, 9): [0, 64, 128, 192, 256, 320, 384, 448, 512, 576],
    (300, 3): [0, 128, 256, 300],
    (65, 2): [0, 64, 65],
    (100, 4): [0, 64, 100, 100, 100],
}


@pytest.mark.parametrize(("k", "splits"), PIECES)
def test_pieces(device, k, splits) -> None:
    legal(device, 24, k)
    x, fn = case(37, 24, k, device)
    out, sqr_sum = gemm(x, fn, num_splits=splits)
    assert out.shape == (splits, 37, 24) and sqr_sum.shape == (splits, 37)
    assert out.is_contiguous() and sqr_sum.is_contiguous()
    ends = PIECES[k, splits]
    assert len(ends) == splits + 1
    for piece, (begin, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        part, weight = x[:, begin:end].double(), fn[:, begin:end].double()
        assert torch.equal(out[piece], (part @ weight.T).float())
        assert torch.equal(sqr_sum[piece], part.square().sum(-1).float())


@given(numbers(1, 40), numbers(0, 700))
def test_pieces_add_up(device, splits, k) -> None:
    if device.type == "cuda":
        splits, k = min(splits, 4), 256
    x, fn = case(5, 24, k, device)
    whole, parts = gemm(x, fn), gemm(x, fn, num_splits=splits)
    for one, pieces in zip(whole, parts, strict=True):
        assert torch.equal(pieces.sum(0), one)


def test_one_piece_is_the_whole(device) -> None:
    x, fn = random_bf16((70, 320), device), torch.randn(24, 320, device=device)
    for one, pieces in zip(gemm(x, fn), gemm(x, fn, num_splits=1), strict=True):
        assert same_bits(pieces[0], one)


def test_fn_keeps_its_bits_on_the_cpu(device) -> None:
    x = torch.ones((1, 64), dtype=BF16, device=device)
    fn = torch.zeros((8, 64), device=device)
    fn[:, 0] = 1.0 + 2.0**-20
    out, _ = gemm(x, fn)
    if device.type == "cpu":
        assert (out == 1.0 + 2.0**-20).all()
    else:
        assert ((out - 1.0).abs() <= 2.0**-10).all()


def test_squares_are_not_rounded(device) -> None:
    x = torch.zeros((3, 64), dtype=BF16, device=device)
    x[1, 7] = 1.0 + 2.0**-7
    x[2, 3] = -(2.0**60)
    _, sqr_sum = gemm(x, torch.zeros((8, 64), device=device))
    assert sqr_sum.tolist() == [0.0, 1.0 + 2.0**-6 + 2.0**-14, 2.0**120]


def test_rows_are_on_their_own(device) -> None:
    """A row has the same bits at every row count, and a NaN stays in its row."""
    x, fn = random_bf16((129, 576), device), torch.randn(24, 576, device=device)
    out, sqr_sum = gemm(x, fn, num_splits=2)
    for m in (1, 7, 64):
        few, squares = gemm(x[:m], fn, num_splits=2)
        assert same_bits(few, out[:, :m].contiguous())
        assert same_bits(squares, sqr_sum[:, :m].contiguous())
    broken = x.clone()
    broken[40, 570] = float("nan")
    d, squares = gemm(broken, fn, num_splits=2)
    assert d[1, 40].isnan().all() and squares[1, 40].isnan()
    d[1, 40], squares[1, 40] = out[1, 40], sqr_sum[1, 40]
    assert same_bits(d, out) and same_bits(squares, sqr_sum), "the other piece, or another row"


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("shape", [(0, 8, 192), (5, 0, 192), (5, 8, 0), (0, 0, 0)])
def test_empty(device, shape, splits) -> None:
    m, n, k = shape
    x = torch.ones((m, k), dtype=BF16, device=device)
    out, sqr_sum = gemm(x, torch.ones((n, k), device=device), num_splits=splits)
    pieces = () if splits is None else (splits,)
    assert out.shape == (*pieces, m, n) and sqr_sum.shape == (*pieces, m)
    assert not bits(out).any()
    total = sqr_sum if splits is None else sqr_sum.sum(0)
    assert torch.equal(total, torch.full_like(total, float(k)))


def test_refusals(device) -> None:
    x, fn = case(6, 24, 128, device)
    for arg, bad in [
        ("x", x.float()),
        ("x", x[None]),
        ("x", strided(x)),
        ("fn", fn.bfloat16()),
        ("fn", fn[0]),
        ("fn", fn[:, :64].contiguous()),
        ("fn", fn.t().contiguous().t()),
        ("num_splits", 0),
        ("num_splits", -1),
        ("num_splits", 2**31),
    ]:
        with refused(NAME, arg):
            gemm(**({"x": x, "fn": fn} | {arg: bad}))
