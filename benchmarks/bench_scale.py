"""Scale room: packing and re-laying the scales of a token matrix of `hidden` columns."""

from __future__ import annotations

import torch

from benchmarks.cases import Builder, Case, groups, nbytes
from benchmarks.inputs import generator
from benchmarks.shapes import Shape
from dgmoe_ops.formats.layouts import ceil_div

OPS: dict[str, Builder] = {}


def _row_scales(shape: Shape, tokens: int, device: torch.device, seed: int) -> torch.Tensor:
    """Scales of every routed row, as they come off an exchange."""
    size = (tokens * shape.top_k, groups(shape.hidden))
    return torch.rand(size, device=device, generator=generator(device, seed)) + 0.5


def pack_ue8m0(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    scale = _row_scales(shape, tokens, device, seed)
    words = scale.shape[0] * ceil_div(scale.shape[1], 4) * 4
    return Case(lambda: torch.ops.dgmoe.pack_ue8m0(scale), nbytes(scale) + words)


def unpack_ue8m0(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    scale = _row_scales(shape, tokens, device, seed)
    packed = torch.ops.dgmoe.pack_ue8m0(scale)
    columns = scale.shape[1]
    moved = nbytes(scale, packed)
    return Case(lambda: torch.ops.dgmoe.unpack_ue8m0(packed, columns), moved)


def align_scale(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    scale = _row_scales(shape, tokens, device, seed)
    return Case(lambda: torch.ops.dgmoe.align_scale(scale), 2 * nbytes(scale))


OPS.update(pack_ue8m0=pack_ue8m0, unpack_ue8m0=unpack_ue8m0, align_scale=align_scale)
