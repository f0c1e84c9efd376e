"""Samples of the weights room."""

from __future__ import annotations

import torch

from ._make import STRIDES, Sample, generator, hard_rows, normal, with_strides

F8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
SCALES = ("uint8", "e8m0", "float", "hard")


def _weight(seed, batch, n, k, dtype, hard) -> torch.Tensor:
    weight = normal((n, k) if batch is None else (batch, n, k), generator(seed))
    if hard and weight.numel():
        hard_rows(weight[..., : min(n, 4), :] if batch is None else weight[-1])
    return weight.to(dtype)


def _block(
    device, *, seed, batch=None, n=140, k=192, round_scale=False, dtype=torch.bfloat16,
    hard=False, strides="dense",
):  # fmt: skip
    weight = _weight(seed, batch, n, k, dtype, hard)
    return (with_strides(weight.to(device), strides), round_scale), {}


def _mxfp8(
    device, *, seed, batch=None, n=5, k=96, dtype=torch.bfloat16, hard=False, strides="dense"
):
    return (with_strides(_weight(seed, batch, n, k, dtype, hard).to(device), strides),), {}


def _mxfp4(
    device, *, seed, batch=None, n=5, k=96, search=False, dtype=torch.bfloat16, hard=False,
    strides="dense",
):  # fmt: skip
    weight = _weight(seed, batch, n, k, dtype, hard)
    return (with_strides(weight.to(device), strides), search), {}


def _scales(shape: tuple[int, ...], kind: str, rng, device, strides: str) -> torch.Tensor:
    """Scales whose exponents differ from each neighbour's; "hard": of every kind, as float32."""
    byte = torch.randint(100, 112, shape, generator=rng)
    lines = torch.arange(shape[-2]).view(-1, 1) * 5 + torch.arange(shape[-1]) * 3
    byte = (byte + lines % 17).to(torch.uint8)
    if kind in ("uint8", "e8m0"):
        if byte.numel() > 2:
            byte.view(-1)[:2] = torch.tensor([0, 255], dtype=torch.uint8)
        scale = with_strides(byte.to(device), strides)
        return scale.view(E8M0) if kind == "e8m0" else scale
    scale = torch.exp2(byte.float() - 127)
    if kind == "hard" and scale.numel():
        values = torch.tensor(
            [0.0, 2.0**-127, 2.0**-128, 0.0117, float("inf"), float("nan"), -1.0, 3e38, 2.0**120]
        )
        scale.view(-1)[: len(values)] = values[: scale.numel()]
    return with_strides(scale.to(device), strides)


def _requant(
    device, *, seed, batch=None, n=140, k=192, kind="mixed", hard=False, strides="dense",
    scale_strides="dense",
):  # fmt: skip
    rng = generator(seed)
    shape = (n, k) if batch is None else (batch, n, k)
    code = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
    if not hard:
        code = torch.where(code % 128 == 127, code - 1, code)  # no NaN
    blocks = (*shape[:-2], -(-n // 128), -(-k // 128))
    scale = _scales(blocks, "float" if kind == "mixed" else kind, rng, device, scale_strides)
    if kind == "mixed":
        factor = 1 + torch.randint(0, 2, blocks, generator=rng) * torch.rand(blocks, generator=rng)
        scale = with_strides((scale.cpu() * factor).to(device), scale_strides)
    weight = with_strides(code.to(device), strides).view(F8)
    return (weight, scale), {}


def _dequant(
    device, *, seed, batch=None, n=5, k=96, kind="uint8", unsigned=False, strides="dense",
    scale_strides="dense",
):  # fmt: skip
    rng = generator(seed)
    shape = (n, k // 2) if batch is None else (batch, n, k // 2)
    code = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
    scale = _scales((*shape[:-1], -(-k // 32)), kind, rng, device, scale_strides)
    weight = with_strides(code.to(device), strides)
    return (weight if unsigned else weight.view(torch.int8), scale), {}


_EMPTY = [{"n": 0}, {"k": 0}, {"batch": 0}, {"n": 1, "k": 2}]
_GROUP_EDGES = [
    *_EMPTY,
    {"batch": 3, "n": 32, "k": 130, "strides": "sliced"},
    {"n": 64, "k": 256, "strides": "transposed"},
    {"n": 33, "k": 200, "strides": "stepped", "dtype": torch.float32},
    {"n": 16, "k": 320, "hard": True},
    {"batch": 2, "n": 9, "k": 66, "hard": True, "dtype": torch.float32},
]
_GROUP_SPACE = {
    "batch": (None, 0, 1, 2),
    "n": (0, 1, 5, 32),
    "k": (0, 2, 8, 30, 32, 66, 128, 192),
    "dtype": (torch.bfloat16, torch.float32),
    "hard": (False, True),
    "strides": STRIDES,
}
_SHAPES = {
    "batch": (None, 0, 1, 2),
    "n": (0, 1, 7, 128, 130),
    "k": (0, 2, 8, 32, 66, 128, 192),
    "strides": STRIDES,
    "scale_strides": STRIDES,
}

SAMPLES = {
    "quant_block_fp8": Sample(
        _block,
        {"n": 5, "k": 7},
        [
            {"n": 0},
            {"k": 0},
            {"batch": 0},
            {"batch": 1, "n": 1, "k": 1},
            {"batch": 3, "n": 32, "k": 130, "strides": "sliced"},
            {"n": 256, "k": 256, "strides": "transposed", "round_scale": True},
            {"n": 130, "k": 576, "strides": "stepped", "dtype": torch.float32},
            {"n": 260, "k": 300, "hard": True},
            {"batch": 2, "n": 129, "k": 129, "hard": True, "round_scale": True},
            {"n": 4, "k": 100, "hard": True, "dtype": torch.float32},
        ],
        {
            "batch": (None, 0, 1, 2),
            "n": (0, 1, 7, 32, 128, 130),
            "k": (0, 1, 7, 32, 128, 192),
            "round_scale": (False, True),
            "dtype": (torch.bfloat16, torch.float32),
            "hard": (False, True),
            "strides": STRIDES,
        },
    ),
    "requant_block_ue8m0": Sample(
        _requant,
        {"n": 5, "k": 7},
        [
            *_EMPTY,
            {"batch": 2, "n": 256, "k": 256, "kind": "uint8"},
            {"batch": 2, "n": 130, "k": 136, "kind": "e8m0", "strides": "sliced"},
            {"n": 300, "k": 259, "kind": "float", "strides": "transposed"},
            {"batch": 3, "n": 140, "k": 400, "kind": "hard", "hard": True},
            {"batch": 2, "n": 260, "k": 130, "hard": True, "scale_strides": "stepped"},
            {"batch": 2, "n": 256, "k": 256, "strides": "stepped", "scale_strides": "transposed"},
        ],
        {**_SHAPES, "kind": (*SCALES, "mixed"), "hard": (False, True)},
    ),
    "dequant_mxfp4_to_fp8": Sample(
        _dequant,
        {"n": 5, "k": 66},
        [
            *_EMPTY,
            {"batch": 2, "n": 256, "k": 256},
            {"batch": 2, "n": 130, "k": 136, "kind": "e8m0", "strides": "sliced"},
            {"n": 300, "k": 258, "kind": "float", "strides": "transposed", "unsigned": True},
            {"batch": 3, "n": 140, "k": 400, "kind": "hard"},
            {"n": 129, "k": 260, "scale_strides": "stepped", "strides": "stepped"},
            {"batch": 2, "n": 128, "k": 128, "kind": "float", "scale_strides": "transposed"},
        ],
        {**_SHAPES, "kind": SCALES, "unsigned": (False, True)},
    ),
    "quant_mxfp8": Sample(
        _mxfp8,
        {"n": 3, "k": 40},
        [*_GROUP_EDGES, {"n": 3, "k": 1}, {"n": 7, "k": 37}],
        {**_GROUP_SPACE, "k": (*_GROUP_SPACE["k"], 1, 33)},
    ),
    "quant_mxfp4": Sample(
        _mxfp4,
        {"n": 3, "k": 40},
        [*_GROUP_EDGES, *({**edge, "search": True} for edge in _GROUP_EDGES[3:])],
        {**_GROUP_SPACE, "search": (False, True)},
    ),
}
