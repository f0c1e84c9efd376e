import pytest
import torch
from helpers import bits, check_random, misaligned, random_bf16, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

preprocess = torch.ops.dgmoe.moe_ep_deepgemm_preprocess
NAME = "moe_ep_deepgemm_preprocess"
TOKENS, HIDDEN, EXPERTS, TOP_K = 37, 200, 5, 3


@pytest.fixture
def routing(device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-1, EXPERTS + 1, (TOKENS, TOP_K), generator=generator).to(device)


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def as_floats(scale: torch.Tensor, groups: int) -> torch.Tensor:
    packed = scale.dtype == torch.int32
    return torch.ops.dgmoe.unpack_ue8m0(scale, groups) if packed else scale


@pytest.mark.parametrize("form", [0, 1, 2])
@pytest.mark.parametrize("padded_k", [None, 256])
@pytest.mark.parametrize("group_size", [32, 128])
def test_is_its_parts_in_one(device, routing, form, padded_k, group_size) -> None:
    x = random_bf16((TOKENS, HIDDEN), device)
    rows, scale, masked_m, src2dst = preprocess(
        x, routing, EXPERTS, group_size=group_size, scale_layout=form, padded_k=padded_k
    )
    assert rows.shape[1] == 256
    counts, index = torch.ops.dgmoe.moe_dispatch_index(routing, EXPERTS, 256)
    assert same_bits(masked_m, counts) and same_bits(src2dst, index)
    q, q_scale = torch.ops.dgmoe.quant_group_fp8(x, group_size, form, False, padded_k)
    groups = -(-rows.shape[2] // group_size)
    flat_scale = as_floats(scale, groups).reshape(-1, groups)
    token_scale = as_floats(q_scale, groups)
    token, slot = (src2dst >= 0).nonzero(as_tuple=True)
    at = src2dst[token, slot].long()
    assert same_bits(rows.view(torch.uint8).flatten(0, 1)[at], q.view(torch.uint8)[token])
    assert same_bits(flat_scale[at], token_scale[token])


@pytest.mark.parametrize("form", [0, 1, 2])
def test_padding_of_a_tile_has_scale_one(device, form: int) -> None:
    ids = torch.zeros((130, 1), dtype=torch.int32, device=device)
    ids[129] = 2
    _, scale, masked_m, _ = preprocess(
        random_bf16((130, 160), device), ids, 3, group_size=32, scale_layout=form
    )
    assert masked_m.tolist() == [129, 0, 1]
    values = as_floats(scale, 5)
    assert (values[0, 129:256] == 1).all() and (values[2, 1:128] == 1).all()
    if form == 2:
        assert ((scale[2, :128, 1] & ~0xFF) == 0).all(), "the missing bytes of a word are zero"


def test_bf16_rows(device, routing) -> None:
    x = random_bf16((TOKENS, HIDDEN), device)
    rows, scale, _, src2dst = preprocess(x, routing, EXPERTS, group_size=0, padded_k=208)
    assert rows.dtype == torch.bfloat16 and scale.shape == (0,) and scale.dtype == torch.float32
    token, slot = (src2dst >= 0).nonzero(as_tuple=True)
    placed = rows.flatten(0, 1)[src2dst[token, slot].long()]
    assert same_bits(placed[:, :HIDDEN].contiguous(), x[token])
    assert not bits(placed[:, HIDDEN:]).any()


def test_one_rank_of_two(device, routing) -> None:
    """What a rank holds of its experts is what a single rank would hold."""
    x = random_bf16((TOKENS, HIDDEN), device)
    whole_rows, _, whole_m, _ = preprocess(x, routing, EXPERTS)
    rows, _, masked_m, _ = preprocess(x, routing, 2, expert_start=3)
    assert masked_m.tolist() == whole_m[3:].tolist()
    for e in range(2):
        count = int(masked_m[e])
        assert same_bits(rows[e, :count], whole_rows[3 + e, :count])


def test_views_do_not_matter(device, routing) -> None:
    x = random_bf16((TOKENS, HIDDEN), device)
    rows, scale, masked_m, src2dst = preprocess(x, routing, EXPERTS)
    for view in (strided(x), misaligned(x)):
        other = preprocess(view, strided(routing), EXPERTS)
        assert same_bits(other[2], masked_m) and same_bits(other[3], src2dst)
        for e, count in enumerate(masked_m.tolist()):
            assert same_bits(other[0][e, :count], rows[e, :count])
            assert same_bits(other[1][e, :count], scale[e, :count])


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(0, 2, 3), (4, 0, 3), (4, 2, 0), (0, 0, 0)]
)
@pytest.mark.parametrize("group_size", [0, 128])
def test_empty(device, tokens: int, top_k: int, experts: int, group_size: int) -> None:
    ids = torch.zeros((tokens, top_k), dtype=torch.int64, device=device)
    x = random_bf16((tokens, 64), device)
    rows, _, masked_m, src2dst = preprocess(x, ids, experts, group_size=group_size)
    assert rows.shape == (experts, 0 if tokens == 0 else 256, 64)
    assert masked_m.tolist() == [0] * experts and (src2dst == -1).all()


def test_refusals(device, routing) -> None:
    x = random_bf16((TOKENS, HIDDEN), device)
    for bad in (x.float(), x[0], x[None]):
        with refused(NAME, "hidden_states"):
            preprocess(bad, routing, EXPERTS)
    for bad_ids in (routing.short(), routing[0], routing[:-1]):
        with refused(NAME, "topk_ids"):
            preprocess(x, bad_ids, EXPERTS)
    for arg, value in {
        "expert_start": -1,
        "group_size": 64,
        "scale_layout": 3,
        "padded_k": HIDDEN - 1,
        "m_max": TOKENS - 1,
    }.items():
        with refused(NAME, arg):
            preprocess(x, routing, EXPERTS, **{arg: value})
    with refused(NAME, "num_local_experts"):
        preprocess(x, routing, -1)
