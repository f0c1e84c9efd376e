"""Combine room: weighing and summing expert outputs, from the slab and from contiguous segments."""

from __future__ import annotations

import torch

from benchmarks.cases import Builder, Case, Routed, nbytes, random_slab, routed
from benchmarks.shapes import Shape


def _bytes(shape: Shape, tokens: int, case: Routed) -> int:
    """Count every routed row, the result, and an index and a weight a slot."""
    rows = (case.rows + tokens) * shape.hidden * 2
    return rows + nbytes(case.inputs.topk_ids, case.inputs.topk_weights)


def post_reorder_deepgemm(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    case = routed(shape, tokens, device, seed)
    y = random_slab(shape, case.slab, shape.hidden, device)
    ids, weights = case.inputs.topk_ids, case.inputs.topk_weights
    _, src2dst = torch.ops.dgmoe.moe_dispatch_index(ids, shape.experts, case.slab)
    call = lambda: torch.ops.dgmoe.post_reorder_deepgemm(y, src2dst, weights)  # noqa: E731
    return Case(call, _bytes(shape, tokens, case))


def ep_gather(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    case = routed(shape, tokens, device, seed)
    ids, weights = case.inputs.topk_ids, case.inputs.topk_weights
    _, _, m_indices, output_index = torch.ops.dgmoe.ep_scatter(
        case.inputs.hidden_states, None, ids, shape.experts
    )
    y = torch.randn(m_indices.shape[0], shape.hidden, device=device, dtype=torch.bfloat16)
    call = lambda: torch.ops.dgmoe.ep_gather(y, ids, weights, output_index)  # noqa: E731
    return Case(call, _bytes(shape, tokens, case) + nbytes(ids))


OPS: dict[str, Builder] = {"post_reorder_deepgemm": post_reorder_deepgemm, "ep_gather": ep_gather}
