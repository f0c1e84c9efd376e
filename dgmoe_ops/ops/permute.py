"""Permute room: quantise tokens and place them by expert, in a masked slab or in contiguous
segments."""

from __future__ import annotations

import torch

from ..formats.layouts import CONTIG_ALIGNMENT, ScaleLayout, ceil_div, contig_rows, slab_rows
from ._registry import fake_of
from .scale import _empty_scale


def quant_group_fp8(
    x: torch.Tensor,
    group_size: int = 128,
    scale_layout: int = ScaleLayout.ROW_MAJOR,
    round_scale: bool = False,
    padded_k: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to e4m3 with one scale a group of `group_size` consecutive columns.

    Args:
        x: (rows, k) bfloat16 or float32, any strides.
        group_size: 32 or 128. The last group of a row may be shorter.
        scale_layout: a `ScaleLayout`; packed UE8M0 scales are always powers of two.
        round_scale: round fp32 scales up to powers of two.
        padded_k: columns of the result, at least k; zero from k on. Default k.

    Returns:
        q (rows, padded_k) float8_e4m3fn and scale (rows, ceil(padded_k / group_size)) in
        `scale_layout`. `q * scale` approximates x; values saturate at 448; a group with an inf or
        NaN is all NaN.

    Raises:
        ValueError: an argument has the wrong dtype, rank or value.

    Source: DeepSeek-V3 technical report, section 3.3.2 (fine-grained quantisation).
    """
    return torch.ops.dgmoe.quant_group_fp8(x, group_size, scale_layout, round_scale, padded_k)


@fake_of("quant_group_fp8")
def _quant_group_fp8_fake(x, group_size, scale_layout, round_scale=False, padded_k=None):
    rows, width = x.shape[0], x.shape[1] if padded_k is None else padded_k
    q = x.new_empty((rows, width), dtype=torch.float8_e4m3fn)
    return q, _empty_scale(x, None, rows, ceil_div(width, group_size), scale_layout)


def moe_dispatch_index(
    topk_ids: torch.Tensor, num_local_experts: int, m_max: int, expert_start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the rows of each local expert and find the slab row of each (token, slot).

    Args:
        topk_ids: (tokens, top_k) int32 or int64, any strides. Ids outside
            [expert_start, expert_start + num_local_experts) are not routed here.
        num_local_experts: E.
        m_max: slab rows an expert; at least the number of tokens.
        expert_start: global id of local expert 0.

    Returns:
        masked_m (E,) int32, the true row counts, and src2dst (tokens, top_k) int32, row `e * m_max
        + j` of the slab or -1. Rows follow token order; a token that names an expert twice has one
        row, shared by both slots.

    Raises:
        ValueError: an argument has the wrong dtype, rank or value.
    """
    return torch.ops.dgmoe.moe_dispatch_index(topk_ids, num_local_experts, m_max, expert_start)


@fake_of("moe_dispatch_index")
def _moe_dispatch_index_fake(topk_ids, num_local_experts, m_max, expert_start=0):
    masked_m = topk_ids.new_empty((num_local_experts,), dtype=torch.int32)
    return masked_m, topk_ids.new_empty(tuple(topk_ids.shape), dtype=torch.int32)


def moe_ep_deepgemm_preprocess(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    num_local_experts: int,
    *,
    expert_start: int = 0,
    group_size: int = 128,
    scale_layout: int = ScaleLayout.MN_MAJOR,
    round_scale: bool = False,
    padded_k: int | None = None,
    m_max: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count, place and quantise tokens into the masked slab that GEMM1 reads.

    Args:
        hidden_states: (tokens, hidden) bfloat16, any strides.
        topk_ids: (tokens, top_k) int32 or int64, any strides; see `moe_dispatch_index`.
        num_local_experts: E.
        expert_start: global id of local expert 0.
        group_size: 32 or 128, or 0 to keep the rows in bfloat16.
        scale_layout, round_scale, padded_k: as in `quant_group_fp8`.
        m_max: slab rows an expert, at least the number of tokens. Default round_up(tokens, 256).

    Returns:
        rows (E, m_max, padded_k) float8_e4m3fn, or bfloat16 where `group_size` is 0; scale (E,
        m_max, groups) in `scale_layout`, or (0,); masked_m (E,) and src2dst (tokens, top_k), both
        int32. Rows past masked_m[e] are undefined.

    Raises:
        ValueError: an argument has the wrong dtype, rank or value.
    """
    return torch.ops.dgmoe.moe_ep_deepgemm_preprocess(
        hidden_states,
        topk_ids,
        num_local_experts,
        expert_start=expert_start,
        group_size=group_size,
        scale_layout=scale_layout,
        round_scale=round_scale,
        padded_k=padded_k,
        m_max=m_max,
    )


@fake_of("moe_ep_deepgemm_preprocess")
def _moe_ep_deepgemm_preprocess_fake(
    hidden_states,
    topk_ids,
    num_local_experts,
    *,
    expert_start=0,
    group_size=128,
    scale_layout=1,
    round_scale=False,
    padded_k=None,
    m_max=None,
):
    tokens, hidden = hidden_states.shape
    slab = slab_rows(tokens) if m_max is None else m_max
    width = hidden if padded_k is None else padded_k
    experts = num_local_experts
    rows_dtype = torch.float8_e4m3fn if group_size else hidden_states.dtype
    rows = hidden_states.new_empty((experts, slab, width), dtype=rows_dtype)
    if group_size:
        groups = ceil_div(width, group_size)
        scale = _empty_scale(hidden_states, experts, slab, groups, scale_layout)
    else:
        scale = hidden_states.new_empty((0,), dtype=torch.float32)
    masked_m = hidden_states.new_empty((experts,), dtype=torch.int32)
    src2dst = hidden_states.new_empty(tuple(topk_ids.shape), dtype=torch.int32)
    return rows, scale, masked_m, src2dst


def ep_scatter(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    num_local_experts: int,
    *,
    expert_start: int = 0,
    scale_layout: int = ScaleLayout.MN_MAJOR,
    alignment: int = CONTIG_ALIGNMENT,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Place tokens into contiguous segments, one an expert, each padded to `alignment` rows.

    Args:
        x: (tokens, k) float8_e4m3fn, or bfloat16; any strides.
        x_scale: (tokens, groups) float32 or (tokens, words) int32 packed UE8M0, any strides; None
            for bfloat16.
        topk_ids: (tokens, top_k) int32 or int64, any strides; see `moe_dispatch_index`.
        num_local_experts: E.
        expert_start: global id of local expert 0.
        scale_layout: `ScaleLayout` of the result: 0 or 1 for float32 scales, 2 for packed ones.
        alignment: rows to which a segment is padded, a multiple of 4.

    Returns:
        rows (M, k) in the dtype of x, with M = `layouts.contig_rows(tokens * top_k, E, alignment)`;
        scale (M, columns) in `scale_layout`, or (0,); m_indices (M,) int32, the expert of a row or
        -1; src2dst (tokens, top_k) int32, a row or -1. Rows with m_indices -1 are undefined.

    Raises:
        ValueError: an argument has the wrong dtype, rank or value.
    """
    return torch.ops.dgmoe.ep_scatter(
        x,
        x_scale,
        topk_ids,
        num_local_experts,
        expert_start=expert_start,
        scale_layout=scale_layout,
        alignment=alignment,
    )


@fake_of("ep_scatter")
def _ep_scatter_fake(
    x, x_scale, topk_ids, num_local_experts, *, expert_start=0, scale_layout=1, alignment=128
):
    tokens, top_k = topk_ids.shape
    all_rows = contig_rows(tokens * top_k, num_local_experts, alignment)
    rows = x.new_empty((all_rows, x.shape[1]))
    if x_scale is None:
        scale = x.new_empty((0,), dtype=torch.float32)
    else:
        per_column = 4 if x_scale.dtype == torch.int32 else 1
        scale = _empty_scale(x, None, all_rows, x_scale.shape[1] * per_column, scale_layout)
    m_indices = x.new_empty((all_rows,), dtype=torch.int32)
    return rows, scale, m_indices, x.new_empty((tokens, top_k), dtype=torch.int32)
