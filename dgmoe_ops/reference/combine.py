"""Oracles of the combine room: fp32 fused multiply-adds in slot order, one rounding."""

from __future__ import annotations

import torch

from ._float import fma, on_cpu


def _combine(y, rows, topk_weights, factor, hidden_size, bias=None, ids=None) -> torch.Tensor:
    hidden = y.shape[-1] if hidden_size is None else hidden_size
    flat = (y.flatten(0, 1) if y.dim() == 3 else y)[:, :hidden].float()
    total = torch.zeros((rows.shape[0], hidden), dtype=torch.float32)
    for slot in range(rows.shape[1]):
        row = rows[:, slot].long()
        here = (row >= 0) & (row < flat.shape[0])
        weight = topk_weights[here, slot].float().unsqueeze(-1)
        taken = flat[row[here]]
        if bias is not None:
            expert = ids[here, slot].long()
            known = (expert >= 0) & (expert < bias.shape[0])
            taken[known] = taken[known] + bias[expert[known], :hidden].float()
        total[here] = fma(taken, weight, total[here])
    out = torch.empty(total.shape, dtype=torch.bfloat16)
    return out.copy_(total * torch.tensor(factor, dtype=torch.float32))


@on_cpu
def post_reorder_deepgemm_ref(
    y: torch.Tensor,
    src2dst: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    routed_scaling_factor: float = 1.0,
    hidden_size: int | None = None,
    bias: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_start: int = 0,
) -> torch.Tensor:
    local = None if topk_ids is None else topk_ids.long() - expert_start
    return _combine(y, src2dst, topk_weights, routed_scaling_factor, hidden_size, bias, local)


@on_cpu
def ep_gather_ref(
    y: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    output_index: torch.Tensor,
    *,
    hidden_size: int | None = None,
) -> torch.Tensor:
    rows = torch.where(topk_ids < 0, -1, output_index.long())
    return _combine(y, rows, topk_weights, 1.0, hidden_size)
