"""Oracles of the route room: rank experts row by row, weigh them in float64."""

from __future__ import annotations

import torch

from ._float import on_cpu

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = 0, 1, 2
#: keys that differ by less, relative to the larger, may stand in either order
NEAR = 2e-5
#: units of 2^-24 by which an fp32 weight may be off: exp of a difference of up to 96 that was
#: rounded before (96), the polynomials (4), the sums and quotients (28)
UNITS = 128


def _scores(x: torch.Tensor, scoring: int) -> torch.Tensor:
    if scoring == SOFTMAX:
        return x.softmax(-1)
    if scoring == SIGMOID:
        return x.sigmoid()
    if scoring == SQRT_SOFTPLUS:
        return torch.logaddexp(x, torch.zeros_like(x)).sqrt()
    return x


def _ranking(keys: list[float], ids: list[int]) -> list[int]:
    """Sort ids by falling key; NaN first, the lower id first among equals."""
    return sorted(ids, key=lambda i: (keys[i] == keys[i], -keys[i] if keys[i] == keys[i] else 0, i))


def _close(a: float, b: float) -> bool:
    """Whether fp32 may order two keys otherwise than float64 does."""
    return abs(a - b) <= NEAR * max(abs(a), abs(b))


def _clear(keys: list[float], order: list[int], most: int) -> bool:
    """Whether of the first most + 1 no two neighbours are close without being equal."""
    pairs = zip(order[:most], order[1 : most + 1], strict=False)
    return not any(keys[a] != keys[b] and _close(keys[a], keys[b]) for a, b in pairs)


def _choose(logits, top_k, scoring, bias, num_groups, topk_groups, group_scores):
    """Return the chosen experts of each row, and whether rounding cannot change the choice."""
    experts = logits.shape[1]
    size = experts // num_groups
    scores = _scores(logits, scoring)
    keys = logits if bias is None else scores + bias.double()
    top_two = group_scores == 2 or (group_scores == 0 and bias is not None)
    members = scores if bias is None and top_two else keys
    exact = bias is None and not top_two  # logits are compared as they came
    chosen, clear = [], []
    for row, group_row in zip(keys.tolist(), members.tolist(), strict=True):
        reach, decided = list(range(experts)), True
        if topk_groups < num_groups:
            blocks = [range(g * size, (g + 1) * size) for g in range(num_groups)]
            terms = [
                [group_row[e] for e in _ranking(group_row, list(block))[: 2 if top_two else 1]]
                for block in blocks
            ]
            groups = [sum(best) for best in terms]
            kept = _ranking(groups, list(range(num_groups)))
            last, next_one = kept[topk_groups - 1], kept[topk_groups]
            # Sums of the same terms tie, sums of others may do so by rounding only.
            same = terms[last] == terms[next_one]
            decided = exact or same or not _close(groups[last], groups[next_one])
            reach = [e for e in reach if e // size in kept[:topk_groups]]
        order = _ranking(row, reach)
        decided = decided and (bias is None or _clear(row, order, top_k))
        chosen.append(order[:top_k])
        clear.append(decided)
    ids = torch.tensor(chosen, dtype=torch.int64).view(len(chosen), top_k)
    return ids, torch.tensor(clear, dtype=torch.bool)


def _real(num_tokens: torch.Tensor | None, tokens: int) -> int:
    return tokens if num_tokens is None else max(0, min(tokens, int(num_tokens)))


def _replica(expert_map: torch.Tensor | None, token: int, expert: int) -> int:
    if expert_map is None:
        return expert
    replicas = []
    for entry in expert_map[expert].view(-1).tolist():
        if entry < 0:
            break
        replicas.append(entry)
    return replicas[token % len(replicas)] if replicas else -1


def _weights(
    logits, chosen, real, *, scoring, renormalize=True, routed_scaling_factor=1.0,
    scale_on_output=False, num_tokens=None, num_fused_shared=0, expert_map=None, num_counts=0,
):  # fmt: skip
    """Return the weights in float64, their bound, the ids and the counts."""
    tokens, top_k = chosen.shape
    score = _scores(logits, scoring).gather(1, chosen)
    total = score.sum(-1, keepdim=True)
    routed = score / (total + 1e-20) if renormalize else score
    # Terms of both signs may cancel: the error follows the sum of their sizes.
    loss = score.abs().sum(-1, keepdim=True) / total.abs() if renormalize else 1.0
    bound = routed.abs() * loss * (UNITS * 2.0**-24) + 1e-37
    factor = routed_scaling_factor if scale_on_output else 1.0
    shared = torch.full((tokens, num_fused_shared), factor / routed_scaling_factor).double()
    weights = torch.cat([routed * factor, shared], 1)
    bound = torch.cat([bound * factor, shared * 2.0**-24], 1)
    appended = logits.shape[1] + torch.arange(num_fused_shared)
    ids = torch.cat([chosen, appended.expand(tokens, -1)], 1)
    placed = [
        [_replica(expert_map, token, expert) for expert in row]
        for token, row in enumerate(ids.tolist())
    ]
    ids = torch.tensor(placed, dtype=torch.int32).view(tokens, top_k + num_fused_shared)
    weights[real:], ids[real:] = 0.0, -1
    named = ids[(ids >= 0) & (ids < num_counts)].long()
    return weights, bound, ids, torch.bincount(named, minlength=num_counts)[:num_counts].int()


def _topk(
    logits, top_k, *, scoring=0, bias=None, num_groups=1, topk_groups=1, group_scores=0, **kw
):
    logits = logits.double()
    chosen, clear = _choose(logits, top_k, scoring, bias, num_groups, topk_groups, group_scores)
    real = _real(kw.get("num_tokens"), logits.shape[0])
    clear[real:] = True
    return *_weights(logits, chosen, real, scoring=scoring, **kw), clear


@on_cpu
def topk_gate_ref(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: int = 0,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_scores: int = 0,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    scale_on_output: bool = False,
    num_tokens: torch.Tensor | None = None,
    num_fused_shared: int = 0,
    expert_map: torch.Tensor | None = None,
    num_counts: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights, _, ids, counts, _ = _topk(
        logits,
        top_k,
        scoring=scoring,
        bias=bias,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_scores=group_scores,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        scale_on_output=scale_on_output,
        num_tokens=num_tokens,
        num_fused_shared=num_fused_shared,
        expert_map=expert_map,
        num_counts=num_counts,
    )
    return weights.float(), ids, counts


@on_cpu
def topk_gate_bound(logits, top_k, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact weights in float64 and by how much fp32 may miss them."""
    weights, bound, _, _, _ = _topk(logits, top_k, **kwargs)
    return weights, bound


@on_cpu
def topk_gate_defined(logits, top_k, **kwargs) -> tuple[torch.Tensor, ...]:
    """Leave out rows whose choice hangs on the rounding of a score, and then the counts."""
    weights, _, _, counts, clear = _topk(logits, top_k, **kwargs)
    rows = clear[:, None].expand(weights.shape).contiguous()
    return rows, rows.clone(), torch.full(counts.shape, bool(clear.all()))


def _hash(token_ids, table, logits, *, scoring=2, **kw):
    real = _real(kw.get("num_tokens"), logits.shape[0])
    chosen = torch.zeros((logits.shape[0], table.shape[1]), dtype=torch.int64)
    chosen[:real] = table.long()[token_ids.long()[:real]]
    return _weights(logits.double(), chosen, real, scoring=scoring, **kw)


@on_cpu
def hash_gate_ref(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    logits: torch.Tensor,
    *,
    scoring: int = 2,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    scale_on_output: bool = False,
    num_tokens: torch.Tensor | None = None,
    num_fused_shared: int = 0,
    expert_map: torch.Tensor | None = None,
    num_counts: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights, _, ids, counts = _hash(
        token_ids,
        table,
        logits,
        scoring=scoring,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        scale_on_output=scale_on_output,
        num_tokens=num_tokens,
        num_fused_shared=num_fused_shared,
        expert_map=expert_map,
        num_counts=num_counts,
    )
    return weights.float(), ids, counts


@on_cpu
def hash_gate_bound(token_ids, table, logits, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact weights in float64 and by how much fp32 may miss them."""
    weights, bound, _, _ = _hash(token_ids, table, logits, **kwargs)
    return weights, bound
