import pytest
import torch
from helpers import check_random, int32, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

dispatch = torch.ops.dgmoe.moe_dispatch_index
NAME = "moe_dispatch_index"


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_worked_routing(device) -> None:
    """Token order inside an expert, -1 for slots that go nowhere."""
    masked_m, src2dst = dispatch(int32([[2, 0], [2, -1], [2, 3]], device), 4, 4)
    assert masked_m.tolist() == [1, 0, 3, 1]
    assert src2dst.tolist() == [[8, 0], [9, -1], [10, 12]]


def test_a_token_that_names_an_expert_twice_has_one_row(device) -> None:
    masked_m, src2dst = dispatch(int32([[1, 0, 1], [1, 1, 1]], device), 2, 2)
    assert masked_m.tolist() == [1, 2]
    assert src2dst.tolist() == [[2, 0, 2], [3, 3, 3]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_from_elsewhere_go_nowhere(device, dtype) -> None:
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ids = torch.tensor([[-1, 8, 7], [least, most, 5], [4, 3, 0]], dtype=dtype, device=device)
    masked_m, src2dst = dispatch(ids, 4, 3, 4)
    assert masked_m.tolist() == [1, 1, 0, 1]
    assert src2dst.tolist() == [[-1, -1, 9], [-1, -1, 3], [0, -1, -1]]


def test_wide_ids_are_not_cut(device) -> None:
    ids = torch.tensor([[2**32, 2**32 + 1, 1]], dtype=torch.int64, device=device)
    masked_m, src2dst = dispatch(ids, 2, 1)
    assert masked_m.tolist() == [0, 1] and src2dst.tolist() == [[-1, -1, 1]]


def test_one_hot_expert_fills_its_slab(device) -> None:
    tokens = 1500
    ids = torch.full((tokens, 2), 1, dtype=torch.int64, device=device)
    masked_m, src2dst = dispatch(ids, 3, tokens)
    assert masked_m.tolist() == [0, tokens, 0]
    rows = torch.arange(tokens, 2 * tokens, dtype=torch.int32)
    assert torch.equal(src2dst.cpu(), rows[:, None].expand(-1, 2))


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(0, 2, 4), (3, 0, 4), (3, 2, 0), (0, 0, 0)]
)
def test_empty(device, tokens: int, top_k: int, experts: int) -> None:
    ids = torch.zeros((tokens, top_k), dtype=torch.int32, device=device)
    masked_m, src2dst = dispatch(ids, experts, tokens)
    assert masked_m.tolist() == [0] * experts
    assert src2dst.shape == (tokens, top_k)
    assert (src2dst == -1).all()


def test_views_and_width_do_not_matter(device) -> None:
    ids = torch.randint(-1, 9, (70, 4), device=device)
    expected = dispatch(ids, 8, 128)
    for view in (strided(ids), ids.int(), ids.t().contiguous().t(), ids.repeat(1, 2)[:, :4]):
        for found, wanted in zip(dispatch(view, 8, 128), expected, strict=True):
            assert same_bits(found, wanted)


def test_a_larger_slab_moves_rows_only(device) -> None:
    ids = torch.randint(-1, 9, (30, 3), device=device)
    small, wide = dispatch(ids, 8, 30)[1].long(), dispatch(ids, 8, 256)[1].long()
    experts, rows = small // 30, small % 30
    assert torch.equal(wide, torch.where(small < 0, small, experts * 256 + rows))


def test_refusals(device) -> None:
    ids = torch.zeros((3, 2), dtype=torch.int32, device=device)
    for bad in (ids.short(), ids.float(), ids[0], ids[None]):
        with refused(NAME, "topk_ids"):
            dispatch(bad, 4, 3)
    with refused(NAME, "num_local_experts"):
        dispatch(ids, -1, 3)
    with refused(NAME, "expert_start"):
        dispatch(ids, 4, 3, -1)
    with refused(NAME, "m_max"):
        dispatch(ids, 4, 2)
    with refused(NAME, "m_max"):
        dispatch(ids, 2**16, 2**16)
    # No product of two counts may wrap.
    with refused(NAME, "num_local_experts"):
        dispatch(ids, 2**33, 2**33)
    with refused(NAME, "m_max"):
        dispatch(ids, 4, 2**62)
