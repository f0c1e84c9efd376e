"""Samples of the activation room."""

from __future__ import annotations

import torch

from ._make import (
    STRIDES,
    Sample,
    counts,
    generator,
    hard_rows,
    normal,
    poison_padding,
    segments,
    with_strides,
)


def _slab(device, seed, experts, m, inter, hard, strides):
    rng = generator(seed)
    masked_m = counts(experts, m, rng)
    x = normal((experts, m, 2 * inter), rng)
    x = (hard_rows(x) if hard else x).bfloat16()
    poison_padding(x, torch.arange(m) < masked_m.unsqueeze(-1))
    return with_strides(x.to(device), strides), masked_m.to(device)


def _contiguous(device, seed, experts, most, inter, alignment, indices, hard, strides):
    rng = generator(seed)
    m_indices = segments(experts, most, alignment, rng)
    x = normal((m_indices.numel(), 2 * inter), rng)
    x = (hard_rows(x) if hard else x).bfloat16()
    if not indices:
        return with_strides(x.to(device), strides), None
    return with_strides(poison_padding(x, m_indices >= 0).to(device), strides), m_indices.to(device)


def _silu(
    device, *, seed, masked=True, indices=True, experts=3, m=5, inter=192, hard=False,
    strides="dense",
):  # fmt: skip
    if masked:
        return _slab(device, seed, experts, m, inter, hard, strides), {}
    x, m_indices = _contiguous(device, seed, experts, m, inter, 8, indices, hard, strides)
    return (x,), {"m_indices": m_indices}


def _quant_kwargs(group_size, scale_form, round_scale, round_activation) -> dict:
    return {
        "group_size": group_size,
        "scale_form": scale_form,
        "round_scale": round_scale,
        "round_activation": round_activation,
    }


def _masked(
    device, *, seed, experts=3, m=5, inter=192, group_size=128, scale_form=1, round_scale=False,
    round_activation=False, hard=False, strides="dense",
):  # fmt: skip
    args = _slab(device, seed, experts, m, inter, hard, strides)
    return args, _quant_kwargs(group_size, scale_form, round_scale, round_activation)


def _contig(
    device, *, seed, experts=3, m=5, inter=192, group_size=128, scale_form=1, round_scale=False,
    round_activation=False, alignment=8, indices=True, hard=False, strides="dense",
):  # fmt: skip
    args = _contiguous(device, seed, experts, m, inter, alignment, indices, hard, strides)
    kwargs = _quant_kwargs(group_size, scale_form, round_scale, round_activation)
    return args, {**kwargs, "alignment": alignment}


_SHAPES = [
    {"experts": 0},
    {"m": 0},
    {"inter": 0},
    {"experts": 1, "m": 1, "inter": 1},
    {"inter": 7, "strides": "sliced"},
    {"inter": 32, "strides": "transposed"},
    {"inter": 576, "strides": "stepped"},
    {"experts": 5, "m": 19, "inter": 100, "hard": True},
    {"experts": 3, "m": 260, "inter": 7},
]
_SPACE = {
    "experts": range(0, 5),
    "m": (0, 1, 3, 9, 130),
    "inter": (0, 1, 7, 32, 100, 128, 192),
    "hard": (False, True),
    "strides": STRIDES,
}
_QUANT_SPACE = {
    **_SPACE,
    "group_size": (32, 128),
    "scale_form": (0, 1, 2),
    "round_scale": (False, True),
    "round_activation": (False, True),
}
_FORMS = [
    {"group_size": group, "scale_form": form, "round_scale": rounded, "hard": True, "m": 19}
    for group in (32, 128)
    for form, rounded in ((0, False), (0, True), (1, False), (1, True), (2, False))
] + [{"round_activation": True, "scale_form": form} for form in (1, 2)]

SAMPLES = {
    "silu_and_mul": Sample(
        _silu,
        {},
        [
            *_SHAPES,
            *({"masked": False, **shape} for shape in _SHAPES),
            {"masked": False, "indices": False, "hard": True, "m": 9},
        ],
        {**_SPACE, "masked": (False, True), "indices": (False, True)},
    ),
    "silu_and_mul_post_quant_masked": Sample(_masked, {}, [*_SHAPES, *_FORMS], _QUANT_SPACE),
    "silu_and_mul_post_quant_contig": Sample(
        _contig,
        {},
        [
            *_SHAPES,
            *_FORMS,
            {"indices": False, "inter": 32},
            {"alignment": 128, "m": 130, "inter": 7},
            {"alignment": 1, "m": 3},
        ],
        {**_QUANT_SPACE, "alignment": (1, 4, 8, 128), "indices": (False, True)},
    ),
}
