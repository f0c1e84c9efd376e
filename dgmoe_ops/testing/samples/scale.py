"""Samples of the scale room."""

from __future__ import annotations

import torch

from ._make import STRIDES, Sample, generator, with_strides

_HARD = (
    0.0, -0.0, 1.0, 1.5, 2.0**-126, 2.0**-127, 2.0**-149, 1.1754942e-38, 3.4028235e38,
    2.0**127, -1.0, float("inf"), float("-inf"), float("nan"), 1.0000001, 0.99999994,
)  # fmt: skip


def _shape(batch: int | None, mn: int, columns: int) -> tuple[int, ...]:
    return (mn, columns) if batch is None else (batch, mn, columns)


def _scales(shape, hard: bool, rng) -> torch.Tensor:
    scale = torch.exp2(torch.rand(shape, generator=rng) * 250 - 125)
    # Exact powers of two must stay, so half of the values are.
    exact = torch.rand(shape, generator=rng) < 0.5
    scale = torch.where(exact, torch.exp2(torch.log2(scale).round()), scale)
    if hard and scale.numel():
        flat = scale.view(-1)
        flat[: len(_HARD)] = torch.tensor(_HARD)[: flat.numel()]
    return scale


def _fp32(device, *, seed, batch=None, mn=5, groups=6, hard=False, strides="dense"):
    scale = _scales(_shape(batch, mn, groups), hard, generator(seed))
    return (with_strides(scale.to(device), strides),), {}


def _packed(device, *, seed, batch=None, mn=5, groups=6, strides="dense"):
    shape = (*_shape(batch, mn, -(-groups // 4)), 4)
    byte = torch.randint(0, 256, shape, generator=generator(seed), dtype=torch.uint8)
    if byte.numel() >= 4:
        byte.view(-1)[:4] = torch.tensor([0, 255, 1, 254], dtype=torch.uint8)
    words = byte.view(torch.int32).squeeze(-1)
    return (with_strides(words.to(device), strides), groups), {}


def _any_scale(device, *, seed, kind="float", **case):
    """fp32 scales, or exponent bytes of every value."""
    if kind == "float":
        return _fp32(device, seed=seed, **case)
    shape = _shape(case.get("batch"), case.get("mn", 5), case.get("groups", 6))
    byte = torch.randint(0, 256, shape, generator=generator(seed), dtype=torch.uint8)
    if byte.numel() >= 4:
        byte.view(-1)[:4] = torch.tensor([0, 255, 1, 254], dtype=torch.uint8)
    byte = with_strides(byte.to(device), case.get("strides", "dense"))
    return (byte.view(torch.float8_e8m0fnu) if kind == "e8m0" else byte,), {}


_EDGES = [
    {"mn": 0, "groups": 3},
    {"mn": 3, "groups": 0},
    {"batch": 0, "mn": 3, "groups": 3},
    {"mn": 1, "groups": 1},
    {"batch": 1, "mn": 1, "groups": 1},
    {"mn": 4, "groups": 4, "strides": "transposed"},
    {"mn": 6, "groups": 9, "strides": "sliced"},
    {"batch": 3, "mn": 7, "groups": 5, "strides": "stepped"},
    {"batch": 2, "mn": 257, "groups": 2, "strides": "transposed"},
]
_SPACE = {
    "batch": (None, 0, 1, 3),
    "mn": range(0, 12),
    "groups": range(0, 12),
    "strides": STRIDES,
}
_TINY = {"mn": 3, "groups": 5}
_FP32 = Sample(
    _fp32,
    _TINY,
    [*_EDGES, {"hard": True, "mn": 4, "groups": 5}],
    {**_SPACE, "hard": (False, True)},
)

SAMPLES = {
    "pack_ue8m0": Sample(
        _any_scale,
        _TINY,
        [
            *_FP32.edge_cases,
            {"kind": "uint8", "batch": 3, "mn": 7, "groups": 9, "strides": "stepped"},
            {"kind": "e8m0", "mn": 6, "groups": 6, "strides": "transposed"},
            {"kind": "uint8", "mn": 0},
        ],
        {**_FP32.space, "kind": ("float", "uint8", "e8m0")},
    ),
    "align_scale": _FP32,
    "unpack_ue8m0": Sample(_packed, _TINY, _EDGES, _SPACE),
}
