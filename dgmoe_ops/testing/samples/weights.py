"""Samples of the weights room."""

from __future__ import annotations

import torch

from ._make import STRIDES, Sample, generator, hard_rows, normal, with_strides


def _block(
    device, *, seed, batch=None, n=140, k=192, round_scale=False, dtype=torch.bfloat16,
    hard=False, strides="dense",
):  # fmt: skip
    weight = normal((n, k) if batch is None else (batch, n, k), generator(seed))
    if hard and weight.numel():
        hard_rows(weight[..., : min(n, 4), :] if batch is None else weight[-1])
    return (with_strides(weight.to(dtype).to(device), strides), round_scale), {}


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
    )
}
