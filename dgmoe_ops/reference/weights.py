"""Oracles of the weights room: block quantisation of checkpoint weights."""

from __future__ import annotations

import torch

from ._float import ceil_div, encode_e4m3, float_bits, on_cpu
from .scale import group_scale

BLOCK = 128


@on_cpu
def quant_block_fp8_ref(
    weight: torch.Tensor, round_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, n, k = weight.shape
    rows, columns = ceil_div(n, BLOCK), ceil_div(k, BLOCK)
    q = torch.zeros(tuple(weight.shape), dtype=torch.uint8)
    scale = torch.zeros((*batch, rows, columns), dtype=torch.float32)
    for row in range(rows):
        for column in range(columns):
            at = (
                ...,
                slice(row * BLOCK, (row + 1) * BLOCK),
                slice(column * BLOCK, (column + 1) * BLOCK),
            )
            block = weight[at].float()
            amax_bits = (float_bits(block) & 0x7FFFFFFF).amax((-1, -2))
            value, _, multiplier = group_scale(amax_bits, round_scale)
            q[at] = encode_e4m3(block * multiplier[..., None, None])
            scale[..., row, column] = value
    return q.view(torch.float8_e4m3fn), scale
