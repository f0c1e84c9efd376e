"""Samples of the combine room."""

from __future__ import annotations

import torch

from ... import reference
from ...reference.permute import contig_total
from ._make import STRIDES, Sample, generator, normal, routing, with_strides


def _weights(tokens, top_k, dtype, device, strides, rng) -> torch.Tensor:
    weights = torch.rand((tokens, top_k), generator=rng) - 0.25
    return with_strides(weights.to(dtype).to(device), strides)


def _rows_of(rows: torch.Tensor, total: int, width: int, rng) -> torch.Tensor:
    """Return y (total, width) bf16 whose rows that nobody takes are NaN."""
    y = normal((total, width), rng).bfloat16()
    taken = torch.zeros(total, dtype=torch.bool)
    taken[rows[rows >= 0].long()] = True
    y[~taken] = float("nan")
    return y


def _reorder(
    device, *, seed, tokens=5, top_k=3, experts=4, hidden=192, cut=None, slab=True, factor=1.0,
    dtype=torch.float32, ids="mixed", int64=False, beyond=False, strides="dense", bias=None,
    start=0,
):  # fmt: skip
    rng = generator(seed)
    topk_ids = routing(ids, tokens, top_k, experts, 0, rng)
    m = tokens + 2
    if slab:
        _, src2dst = reference.moe_dispatch_index_ref(topk_ids, experts, m)
        y = _rows_of(src2dst, experts * m, hidden, rng).view(experts, m, hidden)
    else:
        total = contig_total(topk_ids.numel(), experts, 8)
        x = torch.zeros((tokens, 1), dtype=torch.bfloat16)
        src2dst = reference.ep_scatter_ref(x, None, topk_ids, experts, alignment=8)[3]
        y = _rows_of(src2dst, total, hidden, rng)
    if beyond and src2dst.numel():
        src2dst[0, 0] = y.shape[0] * (y.shape[1] if slab else 1)
    src2dst = src2dst.to(torch.int64 if int64 else torch.int32).to(device)
    weights = _weights(tokens, top_k, dtype, device, strides, rng)
    args = (with_strides(y.to(device), strides), with_strides(src2dst, strides), weights)
    kwargs = {
        "routed_scaling_factor": factor,
        "hidden_size": None if cut is None else max(0, hidden - cut),
    }
    if bias is not None:
        values = torch.randn((experts, hidden), generator=rng).to(bias).to(device)
        shifted = torch.where(topk_ids < 0, topk_ids, topk_ids + start)
        shifted = shifted.to(torch.int64 if int64 else torch.int32).to(device)
        kwargs["bias"] = with_strides(values, strides)
        kwargs |= {"topk_ids": with_strides(shifted, strides), "expert_start": start}
    return args, kwargs


def _gather(
    device, *, seed, tokens=5, top_k=3, experts=4, hidden=192, cut=None, dtype=torch.float32,
    ids="mixed", int64=False, strides="dense",
):  # fmt: skip
    kwargs = dict(seed=seed, tokens=tokens, top_k=top_k, experts=experts, hidden=hidden, ids=ids)
    (y, index, _), _ = _reorder("cpu", slab=False, **kwargs)
    rng = generator(seed + 1)
    topk_ids = torch.where(index >= 0, index % max(experts, 1), -1)
    index = index.clone()
    if index.numel():
        index[topk_ids < 0] = 0  # a negative id must be enough
    kind = torch.int64 if int64 else torch.int32
    args = (
        with_strides(y.to(device), strides),
        with_strides(topk_ids.to(kind).to(device), strides),
        _weights(tokens, top_k, dtype, device, strides, rng),
        with_strides(index.to(kind).to(device), strides),
    )
    return args, {"hidden_size": None if cut is None else max(0, hidden - cut)}


_EDGES = [
    {"tokens": 0},
    {"top_k": 0},
    {"experts": 0},
    {"hidden": 0},
    {"tokens": 1, "top_k": 1, "experts": 1, "hidden": 1},
    {"ids": "none"},
    {"ids": "one", "top_k": 4, "hidden": 32},
    {"hidden": 7, "strides": "transposed", "dtype": torch.bfloat16},
    {"hidden": 192, "strides": "sliced", "dtype": torch.float16, "cut": 8},
    {"hidden": 576, "strides": "stepped", "int64": True, "cut": 569},
    {"tokens": 33, "top_k": 8, "experts": 12, "hidden": 100, "cut": 0},
]
_SPACE = {
    "tokens": (0, 1, 2, 7),
    "top_k": range(0, 6),
    "experts": range(0, 5),
    "hidden": (0, 1, 7, 32, 192),
    "cut": (None, 0, 1, 40),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "ids": ("mixed", "distinct", "none", "one"),
    "int64": (False, True),
    "strides": STRIDES,
}

SAMPLES = {
    "post_reorder_deepgemm": Sample(
        _reorder,
        {},
        [
            *_EDGES,
            *({"slab": False, "factor": 2.5, **edge} for edge in _EDGES),
            {"beyond": True, "factor": -0.1},
            *({"bias": torch.bfloat16, **edge} for edge in _EDGES),
            {"bias": torch.float32, "start": 3, "slab": False, "top_k": 6},
            {"bias": torch.float32, "hidden": 100, "cut": 30, "int64": True, "tokens": 40},
        ],
        {
            **_SPACE,
            "slab": (False, True),
            "factor": (1.0, 2.5, 0.0),
            "beyond": (False, True),
            "bias": (None, torch.float32, torch.bfloat16),
            "start": (0, 5),
        },
    ),
    "ep_gather": Sample(_gather, {}, _EDGES, _SPACE),
}
