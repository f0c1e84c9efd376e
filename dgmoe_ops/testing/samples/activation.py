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

#: parameters of each variant of the silu ops
_SILU = {
    "silu": {},
    "limit": {"swiglu_limit": 1.5},
    "oai": {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
    "oai_unlimited": {"gemm1_alpha": -0.75},
}
_BETAS = ((4.0, 25.0), (0.5, 1.0), (30.0, 0.125))


def _slab(device, seed, experts, m, inter, hard, strides, over):
    rng = generator(seed)
    masked_m = counts(experts, m, rng)
    x = normal((experts, m, 2 * inter), rng)
    x = (hard_rows(x) if hard else x).bfloat16()
    poison_padding(x, torch.arange(m) < masked_m.unsqueeze(-1))
    if over and experts:
        masked_m[-1] = m + 300  # that expert has every row of its slab
    return with_strides(x.to(device), strides), masked_m.to(device)


def _contiguous(device, seed, experts, most, inter, alignment, indices, hard, strides):
    rng = generator(seed)
    m_indices = segments(experts, most, alignment, rng)
    x = normal((m_indices.numel(), 2 * inter), rng)
    x = (hard_rows(x) if hard else x).bfloat16()
    if not indices:
        return with_strides(x.to(device), strides), None
    return with_strides(poison_padding(x, m_indices >= 0).to(device), strides), m_indices.to(device)


def _columns(device, seed, experts, inter, gate_up_interleave, bias, strides) -> dict:
    """Return gate_up_interleave and bias; 8 turns to 1 where the width does not allow it."""
    kwargs = {
        "gate_up_interleave": 1 if gate_up_interleave == 8 and inter % 8 else gate_up_interleave,
        "bias": None,
    }
    if bias is not None:
        values = torch.randn((experts, 2 * inter), generator=generator(seed + 1))
        kwargs["bias"] = with_strides(values.to(bias).to(device), strides)
    return kwargs


def _plain(device, seed, parameters, masked, indices, experts, m, inter, hard, strides, over,
           gate_up_interleave, bias):  # fmt: skip
    bias = bias if masked or indices else None
    kwargs = {
        **parameters,
        **_columns(device, seed, experts, inter, gate_up_interleave, bias, strides),
    }
    if masked:
        return _slab(device, seed, experts, m, inter, hard, strides, over), kwargs
    x, m_indices = _contiguous(device, seed, experts, m, inter, 8, indices, hard, strides)
    return (x,), {"m_indices": m_indices, **kwargs}


def _silu(
    device, *, seed, act="silu", masked=True, indices=True, experts=3, m=5, inter=192, hard=False,
    strides="dense", over=False, gate_up_interleave=0, bias=None,
):  # fmt: skip
    return _plain(device, seed, _SILU[act], masked, indices, experts, m, inter, hard, strides,
                  over, gate_up_interleave, bias)  # fmt: skip


def _situ(
    device, *, seed, act=_BETAS[0], masked=True, indices=True, experts=3, m=5, inter=192,
    hard=False, strides="dense", over=False, gate_up_interleave=0, bias=None,
):  # fmt: skip
    parameters = {"beta": act[0], "linear_beta": act[1]}
    return _plain(device, seed, parameters, masked, indices, experts, m, inter, hard, strides,
                  over, gate_up_interleave, bias)  # fmt: skip


def _parameters(act) -> dict:
    return _SILU[act] if isinstance(act, str) else {"beta": act[0], "linear_beta": act[1]}


def _quant_kwargs(group_size, scale_layout, round_scale, round_activation) -> dict:
    return {
        "group_size": group_size,
        "scale_layout": scale_layout,
        "round_scale": round_scale,
        "round_activation": round_activation,
    }


def _masked(
    device, *, seed, act="silu", experts=3, m=5, inter=192, group_size=128, scale_layout=1,
    round_scale=False, round_activation=False, hard=False, strides="dense", over=False,
    gate_up_interleave=0, bias=None,
):  # fmt: skip
    args = _slab(device, seed, experts, m, inter, hard, strides, over)
    kwargs = _quant_kwargs(group_size, scale_layout, round_scale, round_activation)
    columns = _columns(device, seed, experts, inter, gate_up_interleave, bias, strides)
    return args, {**kwargs, **_parameters(act), **columns}


def _contig(
    device, *, seed, act="silu", experts=3, m=5, inter=192, group_size=128, scale_layout=1,
    round_scale=False, round_activation=False, alignment=8, indices=True, hard=False,
    strides="dense", gate_up_interleave=0, bias=None,
):  # fmt: skip
    args = _contiguous(device, seed, experts, m, inter, alignment, indices, hard, strides)
    kwargs = _quant_kwargs(group_size, scale_layout, round_scale, round_activation)
    bias = bias if indices else None
    columns = _columns(device, seed, experts, inter, gate_up_interleave, bias, strides)
    return args, {**kwargs, "alignment": alignment, **_parameters(act), **columns}


_FLOAT, _BF16 = torch.float32, torch.bfloat16
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
_COLUMNS = [
    {"gate_up_interleave": 8, "hard": True},
    {"gate_up_interleave": 1, "hard": True, "m": 9},
    {"gate_up_interleave": 1, "inter": 7, "bias": _BF16},
    {"gate_up_interleave": 8, "inter": 704, "bias": _FLOAT, "strides": "sliced"},
    {"gate_up_interleave": 1, "inter": 2880, "bias": _BF16, "m": 3},
    {"bias": _FLOAT, "inter": 100, "strides": "stepped"},
]
_SPACE = {
    "experts": range(0, 5),
    "m": (0, 1, 3, 9, 130),
    "inter": (0, 1, 7, 32, 100, 128, 192),
    "hard": (False, True),
    "strides": STRIDES,
    "gate_up_interleave": (0, 1, 8),
    "bias": (None, _FLOAT, _BF16),
}
_QUANT_SPACE = {
    **_SPACE,
    "group_size": (32, 128),
    "scale_layout": (0, 1, 2),
    "round_scale": (False, True),
    "round_activation": (False, True),
}
_FORMS = [
    {"group_size": group, "scale_layout": form, "round_scale": rounded, "hard": True, "m": 19}
    for group in (32, 128)
    for form, rounded in ((0, False), (0, True), (1, False), (1, True), (2, False))
] + [{"round_activation": True, "scale_layout": form} for form in (1, 2)]
_CONTIG_EDGES = [
    {"indices": False, "inter": 32},
    {"alignment": 128, "m": 130, "inter": 7},
    {"alignment": 4, "m": 3},
]


def _samples(prefix: str, plain, acts: tuple) -> dict[str, Sample]:
    """Return the samples of a family of three ops, whose activation has these variants."""
    acts_hard = [{"act": act, "hard": True, "m": 9} for act in acts]
    quant_acts = [{**case, "scale_layout": form} for case in acts_hard for form in (1, 2)]
    first = {"act": acts[0]}

    def with_first(cases: list[dict]) -> list[dict]:
        return [{**first, **case} for case in cases]

    return {
        prefix: Sample(
            plain,
            first,
            with_first(
                [
                    *_SHAPES,
                    *({"masked": False, **shape} for shape in _SHAPES),
                    {"masked": False, "indices": False, "hard": True, "m": 9},
                    *_COLUMNS,
                    *({"masked": False, **case} for case in _COLUMNS),
                    *acts_hard,
                    {"over": True},
                ]
            ),
            {
                **_SPACE,
                "act": acts,
                "over": (False, True),
                "masked": (False, True),
                "indices": (False, True),
            },
        ),
        f"{prefix}_post_quant_masked": Sample(
            _masked,
            first,
            with_first([*_SHAPES, *_FORMS, *_COLUMNS, *quant_acts, {"over": True, "m": 130}]),
            {**_QUANT_SPACE, "act": acts, "over": (False, True)},
        ),
        f"{prefix}_post_quant_contig": Sample(
            _contig,
            first,
            with_first([*_SHAPES, *_FORMS, *_COLUMNS, *quant_acts, *_CONTIG_EDGES]),
            {**_QUANT_SPACE, "act": acts, "alignment": (4, 8, 12, 128), "indices": (False, True)},
        ),
    }


SAMPLES = {
    **_samples("silu_and_mul", _silu, tuple(_SILU)),
    **_samples("situ_and_mul", _situ, _BETAS),
}
