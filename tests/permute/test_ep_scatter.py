import pytest
import torch
from helpers import (
    check_random,
    int32,
    misaligned,
    random_bf16,
    random_f8,
    refused,
    same_bits,
    strided,
)
from hypothesis import given
from hypothesis.strategies import data

from dgmoe_ops.formats.layouts import contig_rows

scatter = torch.ops.dgmoe.ep_scatter
NAME = "ep_scatter"


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_worked_layout(device) -> None:
    ids = int32([[2, 0], [2, -1], [2, 3]], device)
    x = random_bf16((3, 16), device)
    rows, scale, m_indices, src2dst = scatter(x, None, ids, 4, alignment=4)
    assert rows.shape == (16, 16) and scale.shape == (0,) and scale.dtype == torch.float32
    assert m_indices.tolist() == [0, -1, -1, -1, 2, 2, 2, -1, 3] + [-1] * 7
    assert src2dst.tolist() == [[4, 0], [5, -1], [6, 8]]
    for row, token in {0: 0, 4: 0, 5: 1, 6: 2, 8: 2}.items():
        assert same_bits(rows[row], x[token])


def test_a_token_that_names_an_expert_twice_has_one_row(device) -> None:
    x = random_bf16((2, 8), device)
    out = scatter(x, None, int32([[1, 0, 1], [1, 1, 1]], device), 2, alignment=4)
    assert out[2].tolist()[:8] == [0, -1, -1, -1, 1, 1, -1, -1]
    assert out[3].tolist() == [[4, 0, 4], [5, 5, 5]]


def test_ids_from_elsewhere_go_nowhere(device) -> None:
    ids = torch.tensor([[2**40, -5], [7, 4], [3, 6]], device=device)
    _, _, m_indices, src2dst = scatter(random_bf16((3, 8), device), None, ids, 3, expert_start=4)
    assert src2dst.tolist() == [[-1, -1], [-1, 0], [-1, 128]]
    assert (m_indices >= 0).nonzero().flatten().tolist() == [0, 128]
    assert m_indices[[0, 128]].tolist() == [0, 2]


@pytest.mark.parametrize(("packed", "form"), [(False, 0), (False, 1), (True, 2)])
@pytest.mark.parametrize("alignment", [4, 32, 128])
def test_scales_follow_their_rows(device, packed: bool, form: int, alignment: int) -> None:
    tokens, groups, experts = 40, 5, 6
    x = random_f8((tokens, 160), device)
    scale = torch.pow(2.0, torch.randint(-9, 9, (tokens, groups)).float()).to(device)
    given_scale = torch.ops.dgmoe.pack_ue8m0(scale) if packed else scale
    ids = torch.randint(-1, experts + 1, (tokens, 3), device=device)
    rows, out, m_indices, src2dst = scatter(
        x, given_scale, ids, experts, scale_layout=form, alignment=alignment
    )
    count = contig_rows(tokens * 3, experts, alignment)
    assert rows.shape[0] == out.shape[0] == m_indices.shape[0] == count
    token, slot = (src2dst >= 0).nonzero(as_tuple=True)
    at = src2dst[token, slot].long()
    assert same_bits(rows.view(torch.uint8)[at], x.view(torch.uint8)[token])
    assert same_bits(out[at], given_scale[token])
    assert torch.equal(m_indices[at].long(), ids[token, slot].long())
    # Padding inside a segment holds scale 1; a segment ends where its last tile does.
    used = m_indices >= 0
    end = -(-(int(used.nonzero().max()) + 1) // alignment) * alignment
    padding = ~used[:end]
    values = torch.ops.dgmoe.unpack_ue8m0(out, 8) if packed else out
    assert (values[:end][padding][:, :groups] == 1).all()


def test_row_order_is_token_order(device) -> None:
    ids = torch.randint(0, 3, (300, 2), device=device)
    _, _, m_indices, src2dst = scatter(random_bf16((300, 8), device), None, ids, 3)
    for expert in range(3):
        tokens = (ids == expert).any(dim=1).nonzero().flatten()
        slots = (ids[tokens] == expert).int().argmax(dim=1)
        rows = src2dst[tokens, slots].cpu()
        assert torch.equal(rows, torch.arange(rows[0], rows[0] + len(rows), dtype=torch.int32))
        assert rows[0] % 128 == 0 and (m_indices[rows.long()] == expert).all()


def test_views_do_not_matter(device) -> None:
    x, scale = random_f8((20, 200), device), torch.rand(20, 2, device=device)
    ids = torch.randint(-1, 5, (20, 2), device=device)
    rows, out, m_indices, src2dst = scatter(x, scale, ids, 4)
    at = src2dst[src2dst >= 0].long()
    for view in (strided(x.view(torch.uint8)), misaligned(x.view(torch.uint8))):
        found = scatter(view.view(x.dtype), strided(scale), strided(ids), 4)
        assert same_bits(found[2], m_indices) and same_bits(found[3], src2dst)
        assert same_bits(found[0].view(torch.uint8)[at], rows.view(torch.uint8)[at])
        assert same_bits(found[1][at], out[at])


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(0, 2, 3), (4, 0, 3), (4, 2, 0), (0, 0, 0)]
)
@pytest.mark.parametrize("quantized", [False, True])
def test_empty(device, tokens: int, top_k: int, experts: int, quantized: bool) -> None:
    ids = torch.zeros((tokens, top_k), dtype=torch.int32, device=device)
    x = random_f8((tokens, 64), device) if quantized else random_bf16((tokens, 64), device)
    scale = torch.ones(tokens, 1, device=device) if quantized else None
    rows, _, m_indices, src2dst = scatter(x, scale, ids, experts)
    assert rows.shape == (0, 64) and m_indices.shape == (0,)
    assert src2dst.shape == (tokens, top_k) and (src2dst == -1).all()


def test_nothing_routed_here(device) -> None:
    ids = torch.full((3, 2), -1, dtype=torch.int32, device=device)
    _, _, m_indices, src2dst = scatter(random_bf16((3, 8), device), None, ids, 4)
    assert (m_indices == -1).all() and (src2dst == -1).all()


def test_refusals(device) -> None:
    x, scale, ids = (
        random_f8((3, 64), device),
        torch.ones(3, 1, device=device),
        int32([[0]] * 3, device),
    )
    for bad in (x.float(), x[0], x[None]):
        with refused(NAME, "x"):
            scatter(bad, scale, ids, 4)
    for bad_scale in (None, scale.half(), scale[0], scale[:2]):
        with refused(NAME, "x_scale"):
            scatter(x, bad_scale, ids, 4)
    with refused(NAME, "x_scale"):
        scatter(x.bfloat16(), scale, ids, 4)
    for bad_ids in (ids.short(), ids[0], ids[:2]):
        with refused(NAME, "topk_ids"):
            scatter(x, scale, bad_ids, 4)
    for arg, value in [("scale_layout", 3), ("scale_layout", 2), ("expert_start", -1)]:
        with refused(NAME, arg):
            scatter(x, scale, ids, 4, **{arg: value})
    with refused(NAME, "scale_layout"):
        scatter(x, scale.int(), ids, 4, scale_layout=1)
    for alignment in (0, -4, 6, 2**31, 2**62):
        with refused(NAME, "alignment"):
            scatter(x, scale, ids, 4, alignment=alignment)
    with refused(NAME, "num_local_experts"):
        scatter(x, scale, ids, -1)
