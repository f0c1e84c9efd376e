"""Weight room: quantising w13 of at most eight experts, since every expert costs the same."""

from __future__ import annotations

import torch

from benchmarks.cases import Builder, Case
from benchmarks.inputs import bf16_weight
from benchmarks.shapes import Shape

_MOST_EXPERTS = 8


def quant_block_fp8(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    experts = min(shape.experts, _MOST_EXPERTS)
    weight = bf16_weight(experts, 2 * shape.intermediate, shape.hidden, device, seed)
    blocks = weight.numel() // 128**2
    call = lambda: torch.ops.dgmoe.quant_block_fp8(weight, False)  # noqa: E731
    return Case(call, weight.numel() * 3 + blocks * 4)


OPS: dict[str, Builder] = {"quant_block_fp8": quant_block_fp8}
