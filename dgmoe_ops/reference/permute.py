"""Oracles of the permute room: quantise tokens and place them by expert, one by one."""

from __future__ import annotations

import torch

from ._float import ceil_div, on_cpu, round_up
from .scale import PACKED, POISON, quantize_groups, scale_tensor, unit_words

TILE_ROWS = 128


@on_cpu
def quant_group_fp8_ref(
    x: torch.Tensor,
    group_size: int = 128,
    scale_layout: int = 0,
    round_scale: bool = False,
    padded_k: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, words = quantize_groups(x.float(), group_size, scale_layout, round_scale, padded_k)
    return q.view(torch.float8_e4m3fn), scale_tensor(words, scale_layout)


def _route(topk_ids: torch.Tensor, experts: int, start: int) -> list[dict[int, int]]:
    """Return for each local expert its tokens in order, each with the rank of its row."""
    routed: list[dict[int, int]] = [{} for _ in range(experts)]
    for token, ids in enumerate(topk_ids.tolist()):
        for expert in ids:
            if start <= expert < start + experts:
                tokens = routed[expert - start]
                tokens.setdefault(token, len(tokens))
    return routed


def _src2dst(
    topk_ids: torch.Tensor, routed: list[dict[int, int]], start: int, first_row: list[int]
) -> torch.Tensor:
    out = torch.full(topk_ids.shape, -1, dtype=torch.int32)
    for token, ids in enumerate(topk_ids.tolist()):
        for slot, expert in enumerate(ids):
            if start <= expert < start + len(routed):
                local = expert - start
                out[token, slot] = first_row[local] + routed[local][token]
    return out


@on_cpu
def moe_dispatch_index_ref(
    topk_ids: torch.Tensor, num_local_experts: int, m_max: int, expert_start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    routed = _route(topk_ids, num_local_experts, expert_start)
    masked_m = torch.tensor([len(tokens) for tokens in routed], dtype=torch.int32)
    first_row = [expert * m_max for expert in range(num_local_experts)]
    return masked_m, _src2dst(topk_ids, routed, expert_start, first_row)


def poison_rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of NaNs: bytes 0x7f of e4m3, quiet NaNs of bf16."""
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, float("nan"), dtype=dtype)


@on_cpu
def moe_ep_deepgemm_preprocess_ref(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    num_local_experts: int,
    *,
    expert_start: int = 0,
    group_size: int = 128,
    scale_layout: int = 1,
    round_scale: bool = False,
    padded_k: int | None = None,
    m_max: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, hidden = hidden_states.shape
    experts = num_local_experts
    slab = round_up(tokens, 256) if m_max is None else m_max
    width = hidden if padded_k is None else padded_k
    routed = _route(topk_ids, experts, expert_start)
    masked_m, src2dst = moe_dispatch_index_ref(topk_ids, experts, slab, expert_start)
    if group_size:
        source, words = quantize_groups(
            hidden_states.float(), group_size, scale_layout, round_scale, width
        )
        rows = poison_rows((experts, slab, width), torch.float8_e4m3fn)
        unit = unit_words(ceil_div(width, group_size), scale_layout)
        placed = torch.full((experts, slab, words.shape[-1]), POISON, dtype=torch.int32)
    else:
        source = torch.zeros((tokens, width), dtype=hidden_states.dtype)
        source[:, :hidden] = hidden_states
        rows = poison_rows((experts, slab, width), hidden_states.dtype)
    target = rows.view(torch.uint8) if group_size else rows
    for expert, held in enumerate(routed):
        if group_size:
            placed[expert, : round_up(len(held), TILE_ROWS)] = unit
        for token, rank in held.items():
            target[expert, rank] = source[token]
            if group_size:
                placed[expert, rank] = words[token]
    scale = scale_tensor(placed, scale_layout) if group_size else torch.empty(0)
    return rows, scale, masked_m, src2dst


@on_cpu
def moe_ep_deepgemm_preprocess_defined(
    hidden_states, topk_ids, num_local_experts, **kwargs
) -> tuple[torch.Tensor, ...]:
    rows, scale, masked_m, src2dst = moe_ep_deepgemm_preprocess_ref(
        hidden_states, topk_ids, num_local_experts, **kwargs
    )
    row = torch.arange(rows.shape[1])
    valid = row < masked_m.unsqueeze(-1)
    tile = row // TILE_ROWS * TILE_ROWS < masked_m.unsqueeze(-1)
    scale_mask = spread(tile, scale) if scale.dim() == 3 else everywhere(scale)
    return spread(valid, rows), scale_mask, everywhere(masked_m), everywhere(src2dst)


def spread(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the mask of whole rows, widened to the last dimension of `like`."""
    return rows.unsqueeze(-1).expand(like.shape).contiguous()


def everywhere(like: torch.Tensor) -> torch.Tensor:
    return torch.ones(like.shape, dtype=torch.bool)


def contig_total(assignments: int, experts: int, alignment: int) -> int:
    """Return the rows of a contiguous layout that no routing of `assignments` exceeds."""
    used = min(assignments, experts)
    return alignment * (used + (assignments - used) // alignment) if used else 0


@on_cpu
def ep_scatter_ref(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    num_local_experts: int,
    *,
    expert_start: int = 0,
    scale_layout: int = 1,
    alignment: int = 128,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    total = contig_total(topk_ids.numel(), num_local_experts, alignment)
    routed = _route(topk_ids, num_local_experts, expert_start)
    source = x.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    rows = poison_rows((total, x.shape[1]), x.dtype)
    target = rows.view(torch.uint8)
    m_indices = torch.full((total,), -1, dtype=torch.int32)
    if x_scale is not None:
        words = x_scale.contiguous().view(torch.int32)
        groups = words.shape[1] * (4 if scale_layout == PACKED else 1)
        unit = unit_words(groups, scale_layout)
        placed = torch.full((total, words.shape[1]), POISON, dtype=torch.int32)
    first_row, start = [], 0
    for expert, held in enumerate(routed):
        first_row.append(start)
        end = start + round_up(len(held), alignment)
        if x_scale is not None:
            placed[start:end] = unit
        for token, rank in held.items():
            target[start + rank] = source[token]
            m_indices[start + rank] = expert
            if x_scale is not None:
                placed[start + rank] = words[token]
        start = end
    scale = torch.empty(0) if x_scale is None else scale_tensor(placed, scale_layout)
    return rows, scale, m_indices, _src2dst(topk_ids, routed, expert_start, first_row)


@on_cpu
def ep_scatter_defined(
    x, x_scale, topk_ids, num_local_experts, *, alignment: int = 128, **kwargs
) -> tuple[torch.Tensor, ...]:
    rows, scale, m_indices, src2dst = ep_scatter_ref(
        x, x_scale, topk_ids, num_local_experts, alignment=alignment, **kwargs
    )
    valid = m_indices >= 0
    # Every tile of a segment starts with a valid row.
    tile = valid.view(-1, alignment).any(-1).repeat_interleave(alignment)
    scale_mask = spread(tile, scale) if scale.dim() == 2 else everywhere(scale)
    return spread(valid, rows), scale_mask, everywhere(m_indices), everywhere(src2dst)
