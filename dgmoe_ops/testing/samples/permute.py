"""Samples of the permute room."""

from __future__ import annotations

import torch

from ... import reference
from ._make import STRIDES, Sample, generator, hard_rows, normal, routing, with_strides

_IDS = ("mixed", "distinct", "none", "one", "huge")


def _hidden(tokens, width, hard, rng) -> torch.Tensor:
    x = normal((tokens, width), rng)
    return hard_rows(x) if hard and width else x


def _ids(kind, dtype, strides, device, tokens, top_k, experts, start, rng) -> torch.Tensor:
    # int32 cannot hold the huge ids, so they always come as int64.
    ids = routing(kind, tokens, top_k, experts, start, rng)
    return with_strides((ids if kind == "huge" else ids.to(dtype)).to(device), strides)


def _quant(
    device, *, seed, rows=5, k=192, group_size=128, scale_layout=0, round_scale=False, extra=None,
    dtype=torch.bfloat16, hard=False, strides="dense",
):  # fmt: skip
    x = with_strides(_hidden(rows, k, hard, generator(seed)).to(dtype).to(device), strides)
    return (x, group_size, scale_layout, round_scale, None if extra is None else k + extra), {}


def _dispatch(
    device, *, seed, tokens=5, top_k=3, experts=4, start=0, slack=0, ids="mixed",
    dtype=torch.int32, strides="dense",
):  # fmt: skip
    topk_ids = _ids(ids, dtype, strides, device, tokens, top_k, experts, start, generator(seed))
    return (topk_ids, experts, tokens + slack, start), {}


def _preprocess(
    device, *, seed, tokens=5, hidden=192, top_k=3, experts=4, start=0, group_size=128,
    scale_layout=1, round_scale=False, extra=None, slack=None, ids="mixed", dtype=torch.int32,
    hard=False, strides="dense",
):  # fmt: skip
    rng = generator(seed)
    x = with_strides(_hidden(tokens, hidden, hard, rng).bfloat16().to(device), strides)
    topk_ids = _ids(ids, dtype, strides, device, tokens, top_k, experts, start, rng)
    return (x, topk_ids, experts), {
        "expert_start": start,
        "group_size": group_size,
        "scale_layout": scale_layout,
        "round_scale": round_scale,
        "padded_k": None if extra is None else hidden + extra,
        "m_max": None if slack is None else tokens + slack,
    }


def _scatter(
    device, *, seed, tokens=5, k=192, top_k=3, experts=4, start=0, group_size=128, scale_layout=1,
    quantized=True, alignment=128, ids="mixed", dtype=torch.int32, hard=False, strides="dense",
):  # fmt: skip
    rng = generator(seed)
    x, x_scale = _hidden(tokens, k, hard, rng).bfloat16(), None
    if quantized:
        x, x_scale = reference.quant_group_fp8_ref(x, group_size, scale_layout)
        x_scale = with_strides(x_scale.to(device), strides)
    topk_ids = _ids(ids, dtype, strides, device, tokens, top_k, experts, start, rng)
    return (with_strides(x.to(device), strides), x_scale, topk_ids, experts), {
        "expert_start": start,
        "scale_layout": scale_layout,
        "alignment": alignment,
    }


_ROUTES = [
    {"tokens": 0},
    {"experts": 0},
    {"top_k": 0},
    {"tokens": 1, "top_k": 1, "experts": 1},
    {"ids": "none"},
    {"ids": "one", "top_k": 4},
    {"ids": "huge", "tokens": 9},
    {"start": 3, "dtype": torch.int64, "strides": "transposed"},
    {"ids": "distinct", "tokens": 33, "strides": "stepped", "dtype": torch.int64},
    {"tokens": 17, "experts": 11, "top_k": 6, "start": 2, "strides": "sliced"},
]
_ROUTE_SPACE = {
    "tokens": (0, 1, 2, 7, 19),
    "top_k": range(0, 5),
    "experts": range(0, 6),
    "start": (0, 1, 5),
    "ids": _IDS,
    "dtype": (torch.int32, torch.int64),
    "strides": STRIDES,
}
_QUANT_SPACE = {
    "group_size": (32, 128),
    "scale_layout": (0, 1, 2),
    "round_scale": (False, True),
    "extra": (None, 0, 1, 64, 200),
    "hard": (False, True),
}
_WIDTHS = (0, 1, 7, 32, 100, 128, 192, 576)
_FORMS = [
    {"group_size": group, "scale_layout": form, "round_scale": rounded, "hard": True}
    for group in (32, 128)
    for form, rounded in ((0, False), (0, True), (1, False), (1, True), (2, False))
]

SAMPLES = {
    "quant_group_fp8": Sample(
        _quant,
        {"rows": 3, "k": 192},
        [
            {"rows": 0},
            {"k": 0},
            {"k": 0, "extra": 64},
            {"rows": 1, "k": 1},
            {"k": 7, "extra": 121, "scale_layout": 2},
            {"k": 32, "group_size": 32, "strides": "sliced"},
            {"k": 576, "strides": "transposed", "extra": 64, "scale_layout": 1},
            {"k": 100, "dtype": torch.float32, "strides": "stepped"},
            *({"rows": 50, "k": 192, **form} for form in _FORMS),
            {"rows": 50, "k": 130, "extra": 3, "hard": True, "dtype": torch.float32},
            {"rows": 50, "k": 130, "hard": True, "dtype": torch.float32, "scale_layout": 2},
        ],
        {
            "rows": (0, 1, 2, 5, 9),
            "k": _WIDTHS,
            "dtype": (torch.bfloat16, torch.float32),
            "strides": STRIDES,
            **_QUANT_SPACE,
        },
    ),
    "moe_dispatch_index": Sample(
        _dispatch,
        {},
        [*_ROUTES, {"tokens": 300, "experts": 3, "slack": 5}, {"experts": 300, "tokens": 40}],
        {**_ROUTE_SPACE, "slack": (0, 1, 130)},
    ),
    "moe_ep_deepgemm_preprocess": Sample(
        _preprocess,
        {"slack": 2},
        [
            *({"hidden": 32, **route} for route in _ROUTES),
            {"hidden": 0},
            {"hidden": 7, "extra": 121, "scale_layout": 2},
            {"hidden": 576, "extra": 64, "strides": "sliced", "slack": 3},
            {"hidden": 192, "group_size": 0, "extra": 8, "slack": 0},
            {"hidden": 7, "group_size": 0, "hard": True, "strides": "transposed"},
            {"tokens": 130, "hidden": 32, "experts": 2, "group_size": 32, "ids": "one"},
            *({"tokens": 16, "slack": 120, **form} for form in _FORMS),
        ],
        {
            **_ROUTE_SPACE,
            **_QUANT_SPACE,
            "group_size": (0, 32, 128),
            "hidden": _WIDTHS,
            "slack": (None, 0, 1, 130),
        },
    ),
    "ep_scatter": Sample(
        _scatter,
        {"alignment": 8},
        [
            *({"k": 32, **route} for route in _ROUTES),
            {"k": 0, "alignment": 4},
            {"k": 7, "scale_layout": 2, "alignment": 4, "strides": "transposed"},
            {"k": 576, "group_size": 32, "scale_layout": 2, "alignment": 32, "strides": "stepped"},
            {"k": 192, "quantized": False, "alignment": 96, "hard": True, "strides": "sliced"},
            {"tokens": 16, "hard": True, "scale_layout": 0, "alignment": 12},
            {"tokens": 16, "hard": True, "scale_layout": 2, "alignment": 64},
        ],
        {
            **_ROUTE_SPACE,
            "k": _WIDTHS,
            "group_size": (32, 128),
            "scale_layout": (0, 1, 2),
            "quantized": (False, True),
            "alignment": (4, 8, 12, 128),
            "hard": (False, True),
        },
    ),
}
