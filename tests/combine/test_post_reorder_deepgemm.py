import pytest
import torch
from helpers import (
    BF16,
    beside,
    bits,
    check_random,
    int32,
    misaligned,
    random_bf16,
    refused,
    same_bits,
    strided,
)
from hypothesis import given
from hypothesis.strategies import data

import dgmoe_ops

reorder = torch.ops.dgmoe.post_reorder_deepgemm
NAME = "post_reorder_deepgemm"


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_worked_sum(device) -> None:
    y = torch.tensor([[1.0, 2.0], [10.0, 20.0], [float("nan"), float("nan")]])
    src2dst = int32([[0, 1], [1, -1], [-1, -1], [1, 1]], device)
    weights = torch.tensor([[0.5, 0.25], [2.0, float("nan")], [1.0, 1.0], [0.5, 0.5]])
    out = reorder(y.to(BF16).to(device), src2dst, weights.to(device), routed_scaling_factor=2.0)
    assert out.tolist() == [[6.0, 12.0], [40.0, 80.0], [0.0, 0.0], [20.0, 40.0]]
    assert not bits(out)[2].any(), "a token without a row is exactly +0"


def test_order_and_single_rounding(device) -> None:
    """In slot order 2^30 + 1 - 2^30 loses the 1 in fp32; with the 1 last it stays."""
    y = torch.tensor([[2.0**30], [1.0], [-(2.0**30)]]).to(BF16).to(device)
    ones = torch.ones(2, 3, device=device)
    out = reorder(y, int32([[0, 1, 2], [0, 2, 1]], device), ones)
    assert out.flatten().tolist() == [0.0, 1.0]
    # bf16 holds no 257, fp32 does: 256 + 1 + 1 is 258 only where partial sums are not rounded.
    y = torch.tensor([[256.0], [1.0], [1.0]]).to(BF16).to(device)
    assert reorder(y, int32([[0, 1, 2]], device), ones[:1]).item() == 258.0


def test_multiply_adds_are_fused(device) -> None:
    a, b = 1.0 + 2.0**-7, 1.0 + 2.0**-23
    y = torch.tensor([[1.0], [a]]).to(BF16).to(device)
    weights = torch.tensor([[-a, b]], dtype=torch.float32, device=device)
    out = reorder(y, int32([[0, 1]], device), weights)
    assert out.item() == torch.tensor(a * b - a).to(BF16).item()


def test_factor_multiplies_the_sum_in_fp32(device) -> None:
    y, one = torch.tensor([[3.0]]).to(BF16).to(device), torch.ones(1, 1, device=device)
    out = reorder(y, int32([[0]], device), one, routed_scaling_factor=0.1)
    assert out.item() == (torch.tensor(3.0) * torch.tensor(0.1)).to(BF16).item()


def test_rows_that_nobody_names_are_not_read(device) -> None:
    y = random_bf16((3, 8, 24), device)
    src2dst = torch.randint(0, 24, (10, 2), dtype=torch.int32, device=device)
    src2dst[src2dst % 3 == 0] = -1
    weights = torch.rand(10, 2, device=device)
    expected = reorder(y, src2dst, weights)
    named = torch.zeros(24, dtype=torch.bool, device=device)
    named[src2dst[src2dst >= 0].long()] = True
    y.view(24, 24)[~named] = float("nan")
    assert same_bits(reorder(y, src2dst, weights), expected)
    assert same_bits(reorder(y.view(24, 24), src2dst, weights), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_outside_y_are_no_rows(device, dtype) -> None:
    y, edge = random_bf16((4, 16), device), torch.iinfo(dtype)
    src2dst = torch.tensor([[4, 0], [edge.max, edge.min]], dtype=dtype, device=device)
    out = reorder(y, src2dst, torch.ones(2, 2, device=device))
    assert same_bits(out[0], y[0]) and not bits(out[1]).any()


@pytest.mark.parametrize("hidden", [0, 1, 7, 63, 64])
def test_hidden_size_cuts_columns(device, hidden: int) -> None:
    y, src2dst = random_bf16((6, 64), device), int32([[0, 3], [5, -1]], device)
    weights = torch.rand(2, 2, device=device)
    out = reorder(y, src2dst, weights, hidden_size=hidden)
    assert same_bits(out, reorder(y, src2dst, weights)[:, :hidden].contiguous())
    assert out.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_widened(device, dtype) -> None:
    y, src2dst = random_bf16((6, 32), device), int32([[0, 3], [5, -1]], device)
    weights = torch.tensor([[0.3, 1e-7], [-2.5, 1.0]]).to(dtype).to(device)
    assert same_bits(reorder(y, src2dst, weights), reorder(y, src2dst, weights.float()))


def test_views_do_not_matter(device) -> None:
    y, weights = random_bf16((2, 5, 40), device), torch.rand(7, 3, device=device)
    src2dst = torch.randint(-1, 10, (7, 3), device=device)
    expected = reorder(y, src2dst, weights)
    turned = y.transpose(0, 1).contiguous().transpose(0, 1)
    for view in (strided(y), misaligned(y), turned, y.transpose(1, 2).contiguous().transpose(1, 2)):
        assert same_bits(reorder(view, strided(src2dst), strided(weights)), expected)
    assert same_bits(reorder(y, src2dst.int(), weights), expected)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 4, 8), (2, 0, 8)])
def test_empty_y_gives_zeros(device, shape) -> None:
    y = torch.zeros(shape, dtype=BF16, device=device)
    out = reorder(y, int32([[0, -1]] * 3, device), torch.ones(3, 2, device=device))
    assert out.shape == (3, shape[-1]) and not bits(out).any()


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (3, 0)])
def test_no_tokens_or_slots(device, tokens: int, top_k: int) -> None:
    src2dst = torch.zeros((tokens, top_k), dtype=torch.int32, device=device)
    out = reorder(random_bf16((4, 8), device), src2dst, torch.ones(tokens, top_k, device=device))
    assert out.shape == (tokens, 8) and not bits(out).any()


def test_refusals(device) -> None:
    good = {
        "y": random_bf16((4, 8), device),
        "src2dst": int32([[0, 1], [2, 3]], device),
        "topk_weights": torch.ones(2, 2, device=device),
    }
    for arg, bad in [
        ("y", good["y"].float()),
        ("y", good["y"][0]),
        ("y", good["y"][None, None]),
        ("src2dst", good["src2dst"].short()),
        ("src2dst", good["src2dst"][0]),
        ("topk_weights", good["topk_weights"].double()),
        ("topk_weights", good["topk_weights"][0]),
        ("topk_weights", good["topk_weights"][:1]),
        ("topk_weights", good["topk_weights"][:, :1]),
        ("hidden_size", 9),
        ("hidden_size", -1),
    ]:
        with refused(NAME, arg):
            reorder(**(good | {arg: bad}))


def bias_case(device):
    y = torch.tensor([[1.0, 2.0, 0.0], [10.0, 20.0, 0.0]]).to(BF16).to(device)
    bias = torch.tensor([[0.5, 1.0], [4.0, 8.0], [float("nan")] * 2], device=device)
    src2dst = int32([[0, 1], [1, -1], [-1, -1], [0, 0]], device)
    # Ids of experts 6, 7 and 8; the last token's second slot is another rank's.
    ids = int32([[6, 7], [7, 8], [-1, 3], [6, 9]], device)
    weights = torch.tensor([[0.5, 0.25], [2.0, 9.0], [1.0, 1.0], [1.0, 1.0]], device=device)
    return (y, src2dst, weights), {"hidden_size": 2, "topk_ids": ids, "bias": bias}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_worked_bias(device, dtype) -> None:
    args, kwargs = bias_case(device)
    kwargs["bias"] = kwargs["bias"].to(dtype)
    out = reorder(*args, **kwargs, expert_start=6, routed_scaling_factor=2.0)
    # (1 + .5) .5 + (10 + 4) .25 = 4.25, then times two
    assert out.tolist() == [[8.5, 17.0], [56.0, 112.0], [0.0, 0.0], [5.0, 10.0]]
    buffer = torch.empty_like(out)
    kwargs |= {"expert_start": 6, "routed_scaling_factor": 2.0}
    assert same_bits(dgmoe_ops.ops.post_reorder_deepgemm(*args, **kwargs, out=buffer), out)


def test_the_bias_is_added_in_fp32_before_the_weight(device) -> None:
    y = torch.tensor([[256.0]]).to(BF16).to(device)
    bias = torch.tensor([[0.75]], device=device)  # 256.75 is no bf16
    zero = int32([[0]], device)
    hundred = torch.tensor([[100.0]], device=device)
    out = reorder(y, zero, hundred, bias=bias, topk_ids=zero)
    assert out.item() == torch.tensor(25675.0).to(BF16).item() != 25600.0


def test_topk_ids_alone_change_nothing(device) -> None:
    args, kwargs = bias_case(device)
    del kwargs["bias"]
    assert same_bits(reorder(*args, **kwargs), reorder(*args, hidden_size=2))


def test_views_of_a_bias_do_not_matter(device) -> None:
    y, src2dst = random_bf16((9, 40), device), int32([[0, 8], [3, -1]], device)
    ids, weights = int32([[0, 1], [1, 0]], device), torch.rand(2, 2, device=device)
    bias = torch.rand(2, 40, device=device)
    expected = reorder(y, src2dst, weights, bias=bias, topk_ids=ids)
    for view in (strided(bias), misaligned(bias), bias.t().contiguous().t()):
        found = reorder(y, src2dst, weights, bias=view, topk_ids=strided(ids.long()))
        assert same_bits(found, expected)


def test_refusals_of_a_bias(device) -> None:
    args, good = bias_case(device)
    bias, ids = good["bias"], good["topk_ids"]
    for arg, bad in [
        ("bias", bias.double()),
        ("bias", bias[0]),
        ("bias", bias[:, :1]),
        ("topk_ids", None),
        ("topk_ids", ids[:1]),
        ("topk_ids", ids.short()),
        ("expert_start", -1),
    ]:
        with refused(NAME, arg):
            reorder(*args, **(good | {arg: bad}))


def out_case(device):
    y = random_bf16((12, 40), device)
    src2dst = int32([[3, -1], [0, 11], [-1, -1]], device)
    return y, src2dst, torch.tensor([[0.5, 2.0], [1.0, -3.0], [4.0, 5.0]], device=device)


def test_given_buffer(device) -> None:
    args = out_case(device)
    for hidden in (40, 33, 0):
        out = torch.full((3, hidden), float("nan"), dtype=BF16, device=device)
        kwargs = {"routed_scaling_factor": 1.5, "hidden_size": hidden}
        assert reorder.out(*args, **kwargs, out=out) is None
        assert same_bits(out, reorder(*args, **kwargs))
        assert dgmoe_ops.ops.post_reorder_deepgemm(*args, **kwargs, out=out) is out


def test_shared_memory_is_refused(device) -> None:
    y, src2dst, weights = out_case(device)
    named = {"y": y, "src2dst": src2dst, "topk_weights": weights, "topk_ids": src2dst.clone()}
    named["bias"] = random_bf16((12, 40), device)
    expected = reorder(**named)
    for arg in named:
        view, out = beside(named[arg], expected, shared=1)
        with refused(NAME, "out"):
            reorder.out(**(named | {arg: view}), out=out)
        view, out = beside(named[arg], expected, shared=0)
        reorder.out(**(named | {arg: view}), out=out)
        assert same_bits(out, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda y: y.new_empty((3, 40), dtype=torch.float32),
        lambda y: y.new_empty((2, 40)),
        lambda y: y.new_empty((3, 39)),
        lambda y: y.new_empty((40, 3)).t(),
        lambda y: misaligned(y.new_empty((3, 40))),
    ],
    ids=["dtype", "rows", "columns", "strides", "alignment"],
)
def test_bad_buffer(make, device) -> None:
    args = out_case(device)
    with refused(NAME, "out"):
        reorder.out(*args, out=make(args[0]))
