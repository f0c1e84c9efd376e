"""Activation room: the gated activation between the GEMMs, quantised for GEMM2 in the same pass."""

from __future__ import annotations

import torch

from ..layouts import CONTIG_ALIGNMENT, ScaleForm, ceil_div
from ._registry import fake_of
from .scale import _empty_scale


def silu_and_mul(
    gate_up: torch.Tensor,
    masked_m: torch.Tensor | None = None,
    m_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `silu(gate) * up` between the GEMMs of the bf16 recipe, in either layout.

    Args:
        gate_up: (experts, m, 2 * intermediate) bfloat16 with `masked_m`, or (m, 2 * intermediate);
            gate first; any strides.
        masked_m: (experts,) int32, valid rows of each expert.
        m_indices: (m,) int32, -1 for padding; None means that every row is valid.

    Returns:
        (.., intermediate) bfloat16. Computed in fp32, rounded once. Rows that are not valid hold no
        promise.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size.
    """
    return torch.ops.dgmoe.silu_and_mul(gate_up, masked_m, m_indices)


@fake_of("silu_and_mul")
def _silu_and_mul_fake(gate_up, masked_m=None, m_indices=None):
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def silu_and_mul_post_quant_masked(
    gate_up: torch.Tensor,
    masked_m: torch.Tensor,
    *,
    group_size: int = 128,
    scale_form: int = ScaleForm.MN_MAJOR,
    round_scale: bool = False,
    round_activation: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `silu(gate) * up` of a masked slab and quantise it to e4m3 in the same pass.

    Args:
        gate_up: (experts, m, 2 * intermediate) bfloat16, gate first, any strides.
        masked_m: (experts,) int32, valid rows of each expert.
        group_size, scale_form, round_scale: as in `quant_group_fp8`.
        round_activation: round the product to bfloat16 before quantising, for parity with layers
            that do; by default it is quantised from fp32.

    Returns:
        q (experts, m, intermediate) float8_e4m3fn and scale (experts, m, ceil(intermediate /
        group_size)) in `scale_form`. Rows from masked_m[e] on hold no promise; their scales are 1
        within the last valid row's tile of 128 rows.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size.
    """
    return torch.ops.dgmoe.silu_and_mul_post_quant_masked(
        gate_up,
        masked_m,
        group_size=group_size,
        scale_form=scale_form,
        round_scale=round_scale,
        round_activation=round_activation,
    )


def _gated_quant_fake(gate_up, group_size, scale_form):
    *batch, rows, width = gate_up.shape
    inter = width // 2
    q = gate_up.new_empty((*batch, rows, inter), dtype=torch.float8_e4m3fn)
    groups = ceil_div(inter, group_size)
    return q, _empty_scale(gate_up, batch[0] if batch else None, rows, groups, scale_form)


@fake_of("silu_and_mul_post_quant_masked")
def _silu_and_mul_post_quant_masked_fake(
    gate_up, masked_m, *, group_size=128, scale_form=1, round_scale=False, round_activation=False
):
    return _gated_quant_fake(gate_up, group_size, scale_form)


def silu_and_mul_post_quant_contig(
    gate_up: torch.Tensor,
    m_indices: torch.Tensor | None = None,
    *,
    group_size: int = 128,
    scale_form: int = ScaleForm.MN_MAJOR,
    round_scale: bool = False,
    round_activation: bool = False,
    alignment: int = CONTIG_ALIGNMENT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `silu(gate) * up` of contiguous segments and quantise it to e4m3 in the same pass.

    Args:
        gate_up: (m, 2 * intermediate) bfloat16, gate first, any strides.
        m_indices: (m,) int32, the expert of a row or -1 for padding; None means that every row is
            valid.
        group_size, scale_form, round_scale, round_activation: as in
            `silu_and_mul_post_quant_masked`.
        alignment: rows to which segments are padded.

    Returns:
        q (m, intermediate) float8_e4m3fn and scale (m, ceil(intermediate / group_size)) in
        `scale_form`. Padding rows hold no promise; their scales are 1 where they share a tile of
        `alignment` rows with valid ones.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size.
    """
    return torch.ops.dgmoe.silu_and_mul_post_quant_contig(
        gate_up,
        m_indices,
        group_size=group_size,
        scale_form=scale_form,
        round_scale=round_scale,
        round_activation=round_activation,
        alignment=alignment,
    )


@fake_of("silu_and_mul_post_quant_contig")
def _silu_and_mul_post_quant_contig_fake(
    gate_up,
    m_indices=None,
    *,
    group_size=128,
    scale_form=1,
    round_scale=False,
    round_activation=False,
    alignment=128,
):
    return _gated_quant_fake(gate_up, group_size, scale_form)
