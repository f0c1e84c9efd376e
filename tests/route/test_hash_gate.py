import pytest
import torch
from helpers import check_random, int32, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

from dgmoe_ops.layer.routing import Scoring
from dgmoe_ops.testing import compare

gate = torch.ops.dgmoe.hash_gate
NAME = "hash_gate"


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_by_hand(device) -> None:
    token_ids, table = int32([2, 0], device), int32([[1, 3], [0, 2], [3, 0]], device)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]], device=device)
    weights, ids, _ = gate(token_ids, table, logits, renormalize=False)
    assert ids.tolist() == [[3, 0], [1, 3]]
    expected = torch.nn.functional.softplus(torch.tensor([[3.0, 0.0], [5.0, 7.0]])).sqrt()
    assert torch.allclose(weights.cpu(), expected, rtol=1e-6)
    scaled = gate(token_ids, table, logits, routed_scaling_factor=1.5, scale_on_output=True)[0]
    assert torch.allclose(scaled.sum(-1).cpu(), torch.tensor([1.5, 1.5]))


@pytest.mark.parametrize("scoring", list(Scoring))
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (60, 6), (384, 6), (1000, 33)])
def test_sizes(device, experts: int, top_k: int, scoring: Scoring) -> None:
    rng = torch.Generator().manual_seed(experts)
    table = torch.randint(experts, (50, top_k), generator=rng)
    token_ids = torch.randint(50, (9,), generator=rng)
    logits = torch.randn(9, experts, generator=rng)
    args = (token_ids.to(device), table.to(device), logits.to(device))
    compare.check(NAME, args, {"scoring": scoring, "num_counts": experts})
    here = gate(token_ids, table, logits, scoring=scoring)
    assert all(same_bits(a, b) for a, b in zip(gate(*args, scoring=scoring), here, strict=True))


def test_a_bad_logit_stays_with_its_token(device) -> None:
    token_ids, table = int32([0, 0], device), int32([[1, 0]], device)
    logits = torch.zeros(2, 3, device=device)
    logits[0, 1] = float("nan")
    logits[1, 2] = float("nan")  # not named by the table
    weights, ids, _ = gate(token_ids, table, logits)
    assert ids.tolist() == [[1, 0]] * 2
    assert weights[0].isnan().all() and weights[1].isfinite().all()


def test_views_do_not_matter(device) -> None:
    table = torch.randint(16, (20, 4), device=device)
    token_ids = torch.randint(20, (9,), device=device)
    logits = torch.randn(9, 16, device=device)
    expected = gate(token_ids, table, logits)
    views = (strided(token_ids), table.t().contiguous().t(), strided(logits))
    for found, wanted in zip(gate(*views), expected, strict=True):
        assert same_bits(found, wanted)
    for found, wanted in zip(gate(token_ids.int(), table.int(), logits), expected, strict=True):
        assert same_bits(found, wanted)


@pytest.mark.parametrize("token", [-1, 3, 2**31 - 1])
def test_unknown_tokens(device, monkeypatch, token: int) -> None:
    token_ids, table = int32([0, token], device), int32([[1, 3], [0, 2], [3, 0]], device)
    logits = torch.zeros(2, 4, device=device)
    if device.type == "cpu":
        with refused(NAME, "token_ids"):
            gate(token_ids, table, logits)
        return
    monkeypatch.setenv("DGMOE_SANITY_CHECK", "1")
    with refused(NAME, "token_ids"):
        gate(token_ids, table, logits)
    monkeypatch.setenv("DGMOE_SANITY_CHECK", "0")
    weights, ids, counts = gate(token_ids, table, logits, num_counts=4)
    assert ids.tolist() == [[1, 3], [-1, -1]] and (weights[1] == 0).all() and counts.sum() == 2


@pytest.mark.parametrize("expert", [-1, 4, 2**40])
def test_unknown_experts(device, monkeypatch, expert: int) -> None:
    table = torch.tensor([[1, 3], [expert, 2]], device=device)
    token_ids, logits = int32([0, 1], device), torch.zeros(2, 4, device=device)
    if device.type == "cpu":
        with refused(NAME, "table"):
            gate(token_ids, table, logits)
        assert gate(token_ids[:1], table, logits[:1])[1].tolist() == [[1, 3]]  # nobody asks for it
        return
    monkeypatch.setenv("DGMOE_SANITY_CHECK", "1")
    with refused(NAME, "table"):
        gate(token_ids, table, logits)
    assert gate(token_ids[:1], table, logits[:1])[1].tolist() == [[1, 3]]
    monkeypatch.setenv("DGMOE_SANITY_CHECK", "0")
    weights, ids, _ = gate(token_ids, table, logits)
    assert ids.tolist() == [[1, 3], [-1, 2]] and weights[1].tolist() == [0, 1]


def test_padding_is_not_looked_at(device) -> None:
    token_ids, table = int32([0, -9], device), int32([[1, 3]], device)
    weights, ids, _ = gate(
        token_ids, table, torch.zeros(2, 4, device=device), num_tokens=int32([1], device)
    )
    assert ids.tolist() == [[1, 3], [-1, -1]] and weights.tolist() == [[0.5, 0.5], [0, 0]]


def test_empty(device) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    table, logits = int32([[1, 3]], device), torch.zeros(0, 4, device=device)
    weights, ids, counts = gate(none, table, logits, num_counts=4)
    assert weights.shape == ids.shape == (0, 2) and counts.tolist() == [0] * 4
    weights, ids, _ = gate(none, table[:0], logits, num_fused_shared=1)
    assert weights.shape == ids.shape == (0, 3)


def test_refusals(device) -> None:
    token_ids, table = int32([0, 0], device), int32([[1, 3]], device)
    logits = torch.zeros(2, 4, device=device)
    for bad in (token_ids.short(), token_ids.float(), token_ids[None], token_ids[:1]):
        with refused(NAME, "token_ids"):
            gate(bad, table, logits)
    for bad in (table.short(), table.float(), table[0], table.new_zeros(1, 65537)):
        with refused(NAME, "table"):
            gate(token_ids, bad, logits)
    for bad in (logits.double(), logits[0], logits[:, :0]):
        with refused(NAME, "logits"):
            gate(token_ids, table, bad)
    with refused(NAME, "scoring"):
        gate(token_ids, table, logits, scoring=4)
    with refused(NAME, "routed_scaling_factor"):
        gate(token_ids, table, logits, routed_scaling_factor=0.0)
    with refused(NAME, "num_tokens"):
        gate(token_ids, table, logits, num_tokens=logits[0, 0])
    with refused(NAME, "expert_map"):
        gate(token_ids, table, logits, expert_map=int32([0, 0, 0], device))
