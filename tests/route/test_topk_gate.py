import pytest
import torch
from helpers import check_random, int32, misaligned, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

from dgmoe_ops import reference
from dgmoe_ops.layer.routing import Scoring
from dgmoe_ops.testing import compare
from dgmoe_ops.testing.samples import SAMPLES

gate = torch.ops.dgmoe.topk_gate
NAME = "topk_gate"
SIZES = (1, 2, 60, 64, 128, 160, 256, 384, 512, 1000)
each_scoring = pytest.mark.parametrize("scoring", list(Scoring))


def logits_of(tokens: int, experts: int, device, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, experts, generator=rng) * 3).to(device)


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_the_oracle_leaves_few_rows_out() -> None:
    """What is left out because of rounding must stay the exception."""
    promised = []
    for args, kwargs in SAMPLES[NAME].edge():
        promised.append(reference.defined(NAME)(*args, **kwargs)[1].flatten())
    assert torch.cat(promised).double().mean() > 0.98


@each_scoring
@pytest.mark.parametrize("experts", SIZES)
def test_sizes(device, experts: int, scoring: Scoring) -> None:
    logits = logits_of(7, experts, device)
    for top_k in sorted({1, min(8, experts), min(32, experts)}):
        compare.check(NAME, (logits, top_k), {"scoring": scoring})
        bias = torch.randint(-2, 3, (experts,)).float().to(device) / 4
        compare.check(NAME, (logits, top_k), {"scoring": scoring, "bias": bias})


@pytest.mark.parametrize(
    ("experts", "groups", "kept", "top_k"),
    [
        (60, 6, 2, 5),
        (64, 64, 9, 9),
        (160, 8, 3, 6),
        (256, 8, 4, 8),
        (512, 2, 1, 32),
        (1000, 8, 7, 3),
    ],
)
def test_groups(device, experts: int, groups: int, kept: int, top_k: int) -> None:
    logits = logits_of(9, experts, device)
    limits = {"num_groups": groups, "topk_groups": kept}
    for group_scores in (0, 1, 2):
        for bias in (None, torch.randn(experts).to(device) / 4):
            kwargs = {"scoring": Scoring.SIGMOID, "group_scores": group_scores, "bias": bias}
            compare.check(NAME, (logits, top_k), limits | kwargs)
            ids = gate(logits, top_k, **limits, **kwargs)[1].long()
            used = [set(row) for row in (ids // (experts // groups)).tolist()]
            assert all(len(row) <= kept for row in used)


def test_groups_by_hand(device) -> None:
    # The best expert stands in group 0, the best two in group 1.
    logits = torch.tensor([[3.0, -3.0, 2.0, 2.5]], device=device)
    limits = {"scoring": Scoring.SIGMOID, "num_groups": 2, "topk_groups": 1}
    assert gate(logits, 2, **limits)[1].tolist() == [[0, 1]]
    assert gate(logits, 2, **limits, group_scores=2)[1].tolist() == [[3, 2]]
    assert gate(logits, 2, **limits, bias=torch.zeros(4, device=device))[1].tolist() == [[3, 2]]


def test_dropped_groups_stay_dropped_where_keys_are_negative(device) -> None:
    """A dropped expert must not come back because its key was replaced by zero."""
    logits = torch.tensor([[-5.0, -6.0, -7.0, -8.0]], device=device)
    bias = torch.full((4,), -3.0, device=device)
    limits = {"scoring": Scoring.SIGMOID, "num_groups": 2, "topk_groups": 1}
    assert gate(logits, 2, **limits, bias=bias)[1].tolist() == [[0, 1]]


def test_a_group_that_ties_with_itself_counts_both(device) -> None:
    """The best two of a group may be equal; both count."""
    logits = torch.tensor([[1.0, 1.0, 1.5, -9.0]], device=device)
    limits = {"num_groups": 2, "topk_groups": 1, "group_scores": 2, "scoring": Scoring.SIGMOID}
    assert gate(logits, 2, **limits)[1].tolist() == [[0, 1]]


@pytest.mark.parametrize("experts", SIZES)
def test_ties_go_to_the_lower_id(device, experts: int) -> None:
    top_k = min(32, experts)
    equal = torch.zeros(3, experts, device=device)
    equal[1, ::2] = -0.0
    equal[2] = 7.0
    weights, ids, _ = gate(equal, top_k)
    assert ids.tolist() == [list(range(top_k))] * 3
    assert torch.allclose(weights, torch.full_like(weights, 1 / top_k))
    if experts >= 60:
        equal[:, 50] = equal[:, 59] = 8.0
        assert gate(equal, 4)[1].tolist() == [[50, 59, 0, 1]] * 3


@each_scoring
@pytest.mark.parametrize("experts", SIZES)
def test_nan_rows_give_distinct_ids(device, experts: int, scoring: Scoring) -> None:
    top_k = min(8, experts)
    logits = torch.full((3, experts), float("nan"), device=device)
    logits[1] = -logits[1]  # the sign of a NaN does not matter
    logits[2] = 0.5
    weights, ids, _ = gate(logits, top_k, scoring=scoring)
    assert ids.tolist() == [list(range(top_k))] * 3
    assert weights[:2].isnan().all() and weights[2].isfinite().all()
    assert same_bits(weights[0], weights[1])


@pytest.mark.parametrize("experts", [60, 256, 1000])
def test_one_nan_is_chosen_first(device, experts: int) -> None:
    """It shows in the token's result and is not dropped."""
    logits = logits_of(2, experts, device)
    logits[1, 37] = float("nan")
    bias = torch.zeros(experts, device=device)
    for kwargs in ({"bias": bias}, {"bias": bias, "num_groups": 2}, {}):
        weights, ids, _ = gate(logits, 4, scoring=Scoring.SIGMOID, **kwargs)
        assert ids[1, 0] == 37 and len(set(ids[1].tolist())) == 4
        assert weights[1].isnan().all() and weights[0].isfinite().all()


def test_infinite_logits(device) -> None:
    inf = float("inf")
    logits = torch.tensor([[0.0, inf, 1.0, -inf], [-inf, -inf, -inf, -inf]], device=device)
    weights, ids, _ = gate(logits, 4, scoring=Scoring.SIGMOID, renormalize=False)
    assert ids.tolist() == [[1, 2, 0, 3], [0, 1, 2, 3]]
    assert weights[0, 0] == 1 and weights[0, 3] == 0 and (weights[1] == 0).all()
    # Softmax of a row with +inf, or of nothing but -inf, is not a number, and says so.
    assert gate(logits, 4)[0].isnan().all()


def test_bias_chooses_and_does_not_weigh(device) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device)
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0], device=device)
    weights, ids, _ = gate(logits, 2, scoring=Scoring.SIGMOID, bias=bias, renormalize=False)
    assert ids.tolist() == [[3, 0]]
    expected = torch.tensor([[-1.0, 2.0]]).sigmoid()
    assert torch.allclose(weights.cpu(), expected, rtol=1e-6)


def test_saturated_scores_are_told_apart_by_their_logits(device) -> None:
    logits = torch.tensor([[30.0, 40.0, 35.0]], device=device)
    weights, ids, _ = gate(logits, 3, scoring=Scoring.SIGMOID, renormalize=False)
    assert ids.tolist() == [[1, 2, 0]] and (weights == 1).all()


def test_scaling(device) -> None:
    logits = logits_of(5, 16, device)
    plain = gate(logits, 4)[0]
    factor = {"routed_scaling_factor": 2.5}
    assert same_bits(gate(logits, 4, **factor)[0], plain)
    assert same_bits(gate(logits, 4, **factor, scale_on_output=True)[0], plain * 2.5)
    assert torch.allclose(plain.sum(-1), torch.ones(5, device=device))
    raw = gate(logits, 4, renormalize=False)[0]
    assert torch.allclose(raw, logits.softmax(-1).topk(4)[0], rtol=1e-5)


def test_fused_shared_experts(device) -> None:
    logits = logits_of(3, 16, device)
    plain_weights, plain_ids, _ = gate(logits, 4)
    for on_output, weight in ((False, 0.4), (True, 1.0)):
        weights, ids, _ = gate(
            logits, 4, num_fused_shared=2, routed_scaling_factor=2.5, scale_on_output=on_output
        )
        assert ids[:, 4:].tolist() == [[16, 17]] * 3
        assert torch.equal(ids[:, :4], plain_ids)
        assert same_bits(weights[:, 4:].cpu(), torch.full((3, 2), weight))
        assert same_bits(weights[:, :4], plain_weights * (2.5 if on_output else 1.0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("experts", [16, 1000])
def test_padded_rows(device, dtype, experts: int) -> None:
    """-1 is written after the remap: a map's last row must not serve padding."""
    logits = logits_of(6, experts, device)
    expert_map = torch.arange(experts + 1, dtype=torch.int32, device=device) + 100
    kwargs = {"num_fused_shared": 1, "expert_map": expert_map, "num_counts": 2000}
    whole = gate(logits, 4, **kwargs)
    for real in (-3, 0, 4, 6, 99):
        num_tokens = torch.tensor(real, dtype=dtype, device=device)
        for one in (num_tokens, num_tokens[None]):
            weights, ids, counts = gate(logits, 4, num_tokens=one, **kwargs)
            kept = max(0, min(6, real))
            assert same_bits(weights[:kept], whole[0][:kept])
            assert torch.equal(ids[:kept], whole[1][:kept])
            assert (ids[kept:] == -1).all() and same_bits(
                weights[kept:], torch.zeros_like(weights[kept:])
            )
            assert counts.sum() == kept * 5


def test_replicas_take_turns(device) -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0]], device=device).repeat(5, 1)
    expert_map = int32([[10, 11, -1], [5, -1, 7], [-1, 3, 4]], device)
    weights, ids, counts = gate(logits, 3, expert_map=expert_map, num_counts=12)
    assert ids.tolist() == [[10, 5, -1], [11, 5, -1], [10, 5, -1], [11, 5, -1], [10, 5, -1]]
    assert same_bits(weights, gate(logits, 3)[0])
    assert counts.tolist() == [0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 3, 2]


@pytest.mark.parametrize(("tokens", "experts"), [(0, 4), (3, 1), (700, 60), (40, 1000)])
def test_counts(device, tokens: int, experts: int) -> None:
    logits = logits_of(tokens, experts, device)
    top_k = min(6, experts)
    _, ids, counts = gate(logits, top_k, num_counts=experts)
    assert torch.equal(counts.cpu(), torch.bincount(ids.flatten().cpu(), minlength=experts).int())
    fewer = gate(logits, top_k, num_counts=experts // 2)[2]
    assert torch.equal(fewer, counts[: experts // 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [60, 1000])
def test_views_and_width_do_not_matter(device, dtype, experts: int) -> None:
    logits = logits_of(9, experts, device).to(dtype)
    expected = gate(logits, 6)
    for view in (strided(logits), misaligned(logits), logits.t().contiguous().t(), logits.float()):
        for found, wanted in zip(gate(view, 6), expected, strict=True):
            assert same_bits(found, wanted)


@pytest.mark.parametrize("experts", [60, 256, 512, 600])
def test_a_row_does_not_depend_on_the_others(device, experts: int) -> None:
    logits = logits_of(70, experts, device)
    bias = torch.randn(experts, device=device)
    for scoring in Scoring:
        weights, ids, _ = gate(logits, 5, scoring=scoring, bias=bias)
        for row in (0, 33, 69):
            alone = gate(logits[row : row + 1], 5, scoring=scoring, bias=bias)
            assert same_bits(alone[0][0], weights[row]) and torch.equal(alone[1][0], ids[row])


@each_scoring
def test_bits_of_the_cpu(device, scoring: Scoring) -> None:
    if device.type == "cpu":
        pytest.skip("compares with the CPU")
    for experts in SIZES:
        logits = logits_of(50, experts, "cpu")
        logits[3, 0] = float("nan")
        bias = torch.randn(experts)
        for top_k in {1, min(8, experts), min(40, experts)}:
            for held in (None, bias):
                kwargs = {"scoring": scoring, "num_counts": experts}
                here = gate(logits, top_k, bias=held, **kwargs)
                there = None if held is None else held.to(device)
                found = gate(logits.to(device), top_k, bias=there, **kwargs)
                assert all(same_bits(a, b) for a, b in zip(found, here, strict=True))


def test_very_many_experts(device) -> None:
    logits = torch.randperm(65536).float().view(1, -1).to(device)
    assert torch.equal(gate(logits, 40)[1].long(), logits.topk(40)[1])
    limits = {"num_groups": 32768, "topk_groups": 8}
    assert torch.equal(gate(logits, 4, **limits)[1].long(), logits.topk(4)[1])


def test_refusals(device) -> None:
    logits = torch.zeros(3, 12, device=device)
    for bad in (
        logits.double(),
        logits.int(),
        logits[0],
        logits[:, :0],
        logits.new_zeros(1, 65537),
    ):
        with refused(NAME, "logits"):
            gate(bad, 1)
    for top_k, limits in ((13, {}), (-1, {}), (7, {"num_groups": 4, "topk_groups": 2})):
        with refused(NAME, "top_k"):
            gate(logits, top_k, **limits)
    for num_groups in (0, -1, 5, 24):
        with refused(NAME, "num_groups"):
            gate(logits, 1, num_groups=num_groups)
    for topk_groups in (0, 5):
        with refused(NAME, "topk_groups"):
            gate(logits, 1, num_groups=4, topk_groups=topk_groups)
    for scoring in (-1, 4):
        with refused(NAME, "scoring"):
            gate(logits, 1, scoring=scoring)
    with refused(NAME, "group_scores"):
        gate(logits, 1, group_scores=3)
    for bias in (logits[0].double(), logits[0, :11], logits):
        with refused(NAME, "bias"):
            gate(logits, 1, bias=bias)
    for factor in (0.0, -1.0, float("inf"), float("nan"), 1e39, 1e-39):
        with refused(NAME, "routed_scaling_factor"):
            gate(logits, 1, routed_scaling_factor=factor)
    for num_tokens in (logits[0, 0], int32([1, 2], device)):
        with refused(NAME, "num_tokens"):
            gate(logits, 1, num_tokens=num_tokens)
    with refused(NAME, "num_fused_shared"):
        gate(logits, 1, num_fused_shared=-1)
    for bad_map in (int32([0] * 11, device), torch.zeros(12, dtype=torch.int64, device=device)):
        with refused(NAME, "expert_map"):
            gate(logits, 1, expert_map=bad_map)
    with refused(NAME, "expert_map"):  # the shared expert needs a row too
        gate(logits, 1, num_fused_shared=1, expert_map=int32([0] * 12, device))
    with refused(NAME, "num_counts"):
        gate(logits, 1, num_counts=-1)


def test_captures_with_a_changing_number_of_tokens(device) -> None:
    if device.type == "cpu":
        pytest.skip("runs with --device cuda")
    logits, real = logits_of(8, 256, device), int32([8], device)
    gate(logits, 8, num_tokens=real, num_counts=256)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gate(logits, 8, num_tokens=real, num_counts=256)
    for tokens in (8, 0, 5):
        real.fill_(tokens)
        graph.replay()
        expected = gate(logits, 8, num_tokens=real, num_counts=256)
        assert all(same_bits(a, b) for a, b in zip(captured, expected, strict=True))
