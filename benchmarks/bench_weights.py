"""Weight room: quantising w13 of at most eight experts, since every expert costs the same."""

from __future__ import annotations

import torch

from benchmarks.cases import Builder, Case
from benchmarks.inputs import bf16_weight
from benchmarks.shapes import Shape

_MOST_EXPERTS = 8


def _w13(shape: Shape, device: torch.device, seed: int) -> torch.Tensor:
    experts = min(shape.experts, _MOST_EXPERTS)
    return bf16_weight(experts, 2 * shape.intermediate, shape.hidden, device, seed)


def quant_block_fp8(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    weight = _w13(shape, device, seed)
    blocks = weight.numel() // 128**2
    call = lambda: torch.ops.dgmoe.quant_block_fp8(weight, False)  # noqa: E731
    return Case(call, weight.numel() * 3 + blocks * 4)


def quant_mxfp8(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    weight = _w13(shape, device, seed)
    call = lambda: torch.ops.dgmoe.quant_mxfp8(weight)  # noqa: E731
    return Case(call, weight.numel() * 3 + weight.numel() // 32)


def quant_mxfp4(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    weight = _w13(shape, device, seed)
    call = lambda: torch.ops.dgmoe.quant_mxfp4(weight, True)  # noqa: E731
    return Case(call, weight.numel() * 5 // 2 + weight.numel() // 32)


def requant_block_ue8m0(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    weight, scale = torch.ops.dgmoe.quant_block_fp8(_w13(shape, device, seed))
    call = lambda: torch.ops.dgmoe.requant_block_ue8m0(weight, scale)  # noqa: E731
    return Case(call, weight.numel() * 2 + scale.numel() * 5)


def dequant_mxfp4_to_fp8(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    weight, scale = torch.ops.dgmoe.quant_mxfp4(_w13(shape, device, seed))
    call = lambda: torch.ops.dgmoe.dequant_mxfp4_to_fp8(weight, scale)  # noqa: E731
    return Case(call, weight.numel() * 3 + scale.numel() + weight.numel() * 2 // 128**2)


OPS: dict[str, Builder] = {
    "quant_block_fp8": quant_block_fp8,
    "requant_block_ue8m0": requant_block_ue8m0,
    "dequant_mxfp4_to_fp8": dequant_mxfp4_to_fp8,
    "quant_mxfp8": quant_mxfp8,
    "quant_mxfp4": quant_mxfp4,
}
