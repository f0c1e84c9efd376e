"""Samples of the route room.

Logits come from a coarse grid, so that equal ones tie exactly and others stand well apart; the grid
is not symmetric, since sigmoid(x) + sigmoid(-x) is 1 for every x.
"""

from __future__ import annotations

import torch

from ._make import STRIDES, Sample, generator, with_strides

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _logits(tokens, experts, kind, dtype, strides, device, rng) -> torch.Tensor:
    x = torch.randint(-32, 32, (tokens, experts), generator=rng) / 8 + 1 / 32
    if kind == "wide":
        x = torch.randn((tokens, experts), generator=rng) * 8
    if kind == "tied":
        x = (x > 0) * 2.0 - 1.25
    if kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    if kind == "broken" and experts:
        for row, value in enumerate([float("nan"), float("inf"), float("-inf")] * 2):
            if row >= tokens:
                break
            if row < 3:
                x[row] = value
            else:
                x[row, :: max(1, experts // 2)] = value
    return with_strides(x.to(dtype).to(device), strides)


def _map(ids, replicas, device, rng) -> torch.Tensor | None:
    """Each id has up to `replicas` physical ids, some none; 0 replicas: no map."""
    if replicas == 0:
        return None
    table = torch.arange(ids * replicas, dtype=torch.int32).view(replicas, ids).t().contiguous()
    held = torch.randint(0, replicas + 1, (ids, 1), generator=rng)
    table[torch.arange(replicas) >= held] = -1
    return (table[:, 0].contiguous() if replicas == 1 else table).to(device)


def _common(
    device, rng, tokens, experts, *, renormalize, factor, scale_on_output, padding, shared,
    replicas, counts,
):  # fmt: skip
    real = None
    if padding is not None:
        dtype = torch.int32 if padding % 2 else torch.int64
        real = torch.tensor(tokens - padding, dtype=dtype, device=device)
    return {
        "renormalize": renormalize,
        "routed_scaling_factor": factor,
        "scale_on_output": scale_on_output,
        "num_tokens": real,
        "num_fused_shared": shared,
        "expert_map": _map(experts + shared, replicas, device, rng),
        "num_counts": counts,
    }


def _topk(
    device, *, seed, tokens=5, experts=16, top_k=4, groups=(1, 1), group_scores=0, scoring=0,
    biased=False, kind="grid", dtype=torch.float32, strides="dense", renormalize=True, factor=1.0,
    scale_on_output=False, padding=None, shared=0, replicas=0, counts=0,
):  # fmt: skip
    rng = generator(seed)
    num_groups, topk_groups = groups if experts % groups[0] == 0 else (1, 1)
    top_k = min(top_k, topk_groups * (experts // num_groups))
    bias = torch.randint(-4, 5, (experts,), generator=rng) / 4 if biased else None
    common = _common(
        device, rng, tokens, experts, renormalize=renormalize, factor=factor,
        scale_on_output=scale_on_output, padding=padding, shared=shared, replicas=replicas,
        counts=counts,
    )  # fmt: skip
    return (_logits(tokens, experts, kind, dtype, strides, device, rng), top_k), {
        "scoring": scoring,
        "bias": None if bias is None else bias.to(device),
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "group_scores": group_scores,
        **common,
    }


def _hash(
    device, *, seed, tokens=5, experts=16, top_k=4, vocabulary=11, scoring=2, kind="grid",
    ids=torch.int64, dtype=torch.float32, strides="dense", renormalize=True, factor=1.0,
    scale_on_output=False, padding=None, shared=0, replicas=0, counts=0,
):  # fmt: skip
    rng = generator(seed)
    token_ids = torch.randint(0, vocabulary, (tokens,), generator=rng).to(ids)
    if padding:
        token_ids[-padding:] = -7  # nobody looks there
    table = torch.randint(0, experts, (vocabulary, top_k), generator=rng).to(ids)
    common = _common(
        device, rng, tokens, experts, renormalize=renormalize, factor=factor,
        scale_on_output=scale_on_output, padding=padding, shared=shared, replicas=replicas,
        counts=counts,
    )  # fmt: skip
    logits = _logits(tokens, experts, kind, dtype, strides, device, rng)
    table = with_strides(table.to(device), strides)
    return (token_ids.to(device), table, logits), {"scoring": scoring, **common}


_COMMON_EDGES = [
    {"tokens": 0},
    {"tokens": 0, "counts": 3},
    {"top_k": 0, "shared": 2},
    {"tokens": 1, "experts": 1, "top_k": 1},
    {"padding": 0},
    {"padding": 3, "shared": 1, "factor": 2.5, "counts": 17},
    {"padding": 2, "replicas": 3, "shared": 2, "scale_on_output": True, "factor": 2.5},
    {"padding": 1, "replicas": 1, "counts": 9, "renormalize": False},
    {"tokens": 40, "replicas": 2, "counts": 40, "strides": "stepped"},
    {"dtype": torch.bfloat16, "strides": "transposed"},
    {"dtype": torch.float16, "strides": "sliced", "scoring": 1},
    *({"tokens": 9, "kind": "broken", "scoring": scoring} for scoring in range(4)),
    *({"kind": "wide", "scoring": scoring, "renormalize": False} for scoring in (0, 1, 2, 3)),
]
_COMMON_SPACE = {
    "tokens": (0, 1, 2, 7, 19),
    "experts": (1, 2, 8, 60, 64, 160),
    "top_k": (0, 1, 2, 5, 8, 33),
    "scoring": range(4),
    "kind": ("grid", "wide", "tied", "zeros", "broken"),
    "dtype": _DTYPES,
    "strides": STRIDES,
    "renormalize": (False, True),
    "factor": (1.0, 2.5),
    "scale_on_output": (False, True),
    "padding": (None, 0, 1, 2),
    "shared": (0, 1, 3),
    "replicas": (0, 1, 3),
    "counts": (0, 5, 70),
}
_V2 = {"experts": 160, "top_k": 6, "groups": (8, 3), "renormalize": False}
_V3 = {"experts": 256, "top_k": 8, "groups": (8, 4), "scoring": 1, "biased": True}

SAMPLES = {
    "topk_gate": Sample(
        _topk,
        {"biased": True, "scoring": 1},
        [
            *_COMMON_EDGES,
            *({"experts": e, "top_k": 8, "tokens": 3, "kind": "wide"} for e in (60, 128, 384, 512)),
            {"experts": 1000, "top_k": 8, "tokens": 3, "kind": "tied", "groups": (10, 3)},
            {"experts": 1000, "top_k": 32, "tokens": 2, "scoring": 1, "biased": True},
            {"experts": 512, "top_k": 512, "tokens": 2, "kind": "wide"},
            {"experts": 64, "top_k": 40, "tokens": 3, "groups": (4, 3), "counts": 64},
            {**_V2, "kind": "wide", "factor": 16.0, "scale_on_output": True},
            {**_V2, "kind": "tied"},
            {**_V2, "group_scores": 2},
            {**_V3, "factor": 2.5},
            {**_V3, "kind": "tied", "tokens": 7},
            {**_V3, "kind": "broken", "tokens": 7},
            {**_V3, "kind": "zeros", "group_scores": 1},
            {"experts": 8, "groups": (8, 5), "top_k": 3, "biased": True, "scoring": 1},
            {"kind": "zeros", "scoring": 3},
            {"kind": "tied", "tokens": 33, "scoring": 2, "biased": True},
        ],
        {
            **_COMMON_SPACE,
            "groups": ((1, 1), (2, 1), (4, 3), (8, 2)),
            "group_scores": (0, 1, 2),
            "biased": (False, True),
        },
    ),
    "hash_gate": Sample(
        _hash,
        {},
        [*_COMMON_EDGES, {"ids": torch.int32, "experts": 384, "top_k": 6, "tokens": 17}],
        {**_COMMON_SPACE, "ids": (torch.int32, torch.int64)},
    ),
}
