import pytest
import torch
from helpers import (
    BF16,
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

gather = torch.ops.dgmoe.ep_gather
NAME = "ep_gather"


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_worked_sum(device) -> None:
    y = torch.tensor([[1.0, 2.0], [10.0, 20.0]]).to(BF16).to(device)
    ids = int32([[0, 3], [3, -1], [-1, 0]], device)
    index = int32([[0, 1], [1, 0], [1, -1]], device)
    weights = torch.tensor([[0.5, 0.25], [2.0, 1.0], [1.0, 1.0]], device=device)
    assert gather(y, ids, weights, index).tolist() == [[3.0, 6.0], [20.0, 40.0], [0.0, 0.0]]


def test_a_slot_needs_an_id_and_a_row(device) -> None:
    y = random_bf16((3, 16), device)
    ids, index = int32([[-1, 0, 7, 0]], device), int32([[0, -1, 3, 2]], device)
    out = gather(y, ids, torch.ones(1, 4, device=device), index)
    assert same_bits(out[0], y[2])


def test_is_post_reorder_where_all_ids_are_here(device) -> None:
    y, weights = random_bf16((20, 40), device), torch.rand(9, 3, device=device)
    index = torch.randint(-1, 20, (9, 3), dtype=torch.int32, device=device)
    expected = torch.ops.dgmoe.post_reorder_deepgemm(y, index, weights, hidden_size=33)
    ids = torch.zeros_like(index).long()
    assert same_bits(gather(y, ids, weights, index, hidden_size=33), expected)


def test_undoes_ep_scatter(device) -> None:
    x = random_bf16((50, 24), device)
    ids = torch.randint(-1, 5, (50, 1), device=device)
    rows, _, _, src2dst = torch.ops.dgmoe.ep_scatter(x, None, ids, 5)
    out = gather(rows, ids, torch.ones(50, 1, device=device), src2dst)
    assert same_bits(out, torch.where(ids >= 0, x, 0.0).to(BF16))


def test_views_do_not_matter(device) -> None:
    y, weights = random_bf16((9, 40), device), torch.rand(7, 3, device=device)
    ids = torch.randint(-1, 4, (7, 3), device=device)
    index = torch.randint(-1, 9, (7, 3), device=device)
    expected = gather(y, ids, weights, index)
    for view in (strided(y), misaligned(y), y.t().contiguous().t()):
        found = gather(view, strided(ids), strided(weights), strided(index))
        assert same_bits(found, expected)
    assert same_bits(gather(y, ids.int(), weights, index.int()), expected)


@pytest.mark.parametrize(("rows", "tokens", "top_k"), [(0, 3, 2), (4, 0, 2), (4, 3, 0)])
def test_empty_gives_zeros(device, rows: int, tokens: int, top_k: int) -> None:
    ids = torch.zeros((tokens, top_k), dtype=torch.int32, device=device)
    weights = torch.ones(tokens, top_k, device=device)
    out = gather(random_bf16((rows, 8), device), ids, weights, ids if rows else ids - 1)
    assert out.shape == (tokens, 8)
    assert (rows and tokens and top_k) or not bits(out).any()


def test_refusals(device) -> None:
    good = {
        "y": random_bf16((4, 8), device),
        "topk_ids": int32([[0, 1], [2, 3]], device),
        "topk_weights": torch.ones(2, 2, device=device),
        "output_index": int32([[0, 1], [2, 3]], device),
    }
    for arg, bad in [
        ("y", good["y"].float()),
        ("y", good["y"][None]),
        ("topk_ids", good["topk_ids"].short()),
        ("topk_ids", good["topk_ids"][:1]),
        ("topk_ids", good["topk_ids"][:, :1]),
        ("topk_weights", good["topk_weights"].double()),
        ("topk_weights", good["topk_weights"][:1]),
        ("output_index", good["output_index"].float()),
        ("output_index", good["output_index"][0]),
        ("hidden_size", 9),
    ]:
        with refused(NAME, arg):
            gather(**(good | {arg: bad}))
