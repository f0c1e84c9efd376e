"""Permute room: quantising tokens and placing them by expert."""

from __future__ import annotations

import torch

from benchmarks.cases import Builder, Case, check_slab, groups, nbytes, routed
from benchmarks.shapes import Shape
from dgmoe_ops.formats.layouts import ScaleLayout


def quant_group_fp8(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    x = routed(shape, tokens, device, seed).inputs.hidden_states
    call = lambda: torch.ops.dgmoe.quant_group_fp8(x, 128, ScaleLayout.ROW_MAJOR)  # noqa: E731
    return Case(call, x.numel() * 3 + tokens * groups(shape.hidden) * 4)


def moe_dispatch_index(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    case = routed(shape, tokens, device, seed)
    ids = case.inputs.topk_ids
    call = lambda: torch.ops.dgmoe.moe_dispatch_index(ids, shape.experts, case.slab)  # noqa: E731
    return Case(call, 2 * nbytes(ids) + shape.experts * 4)


def moe_ep_deepgemm_preprocess(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    case = routed(shape, tokens, device, seed)
    check_slab(shape, case.slab, shape.hidden)
    x, ids = case.inputs.hidden_states, case.inputs.topk_ids
    scales = case.tile_rows * groups(shape.hidden) * 4
    moved = nbytes(x) + 2 * nbytes(ids) + shape.experts * 4 + case.rows * shape.hidden + scales
    call = lambda: torch.ops.dgmoe.moe_ep_deepgemm_preprocess(x, ids, shape.experts)  # noqa: E731
    return Case(call, moved)


def ep_scatter(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    case = routed(shape, tokens, device, seed)
    ids = case.inputs.topk_ids
    x, scale = torch.ops.dgmoe.quant_group_fp8(
        case.inputs.hidden_states, 128, ScaleLayout.ROW_MAJOR
    )
    written = torch.ops.dgmoe.ep_scatter(x, scale, ids, shape.experts)
    index_bytes = 2 * nbytes(ids) + nbytes(written[2])
    scales = case.tile_rows * groups(shape.hidden) * 4
    moved = nbytes(x, scale) + index_bytes + case.rows * shape.hidden + scales
    return Case(lambda: torch.ops.dgmoe.ep_scatter(x, scale, ids, shape.experts), moved)


OPS: dict[str, Builder] = {
    "quant_group_fp8": quant_group_fp8,
    "moe_dispatch_index": moe_dispatch_index,
    "moe_ep_deepgemm_preprocess": moe_ep_deepgemm_preprocess,
    "ep_scatter": ep_scatter,
}
