"""Activation room: the gated activation between the GEMMs, quantised for GEMM2 in the same pass.

The formulas are those of `dgmoe_ops.activations`, in fp32. On CUDA the hardware approximates them:
of 10^4 e4m3 values at most one is off, by one step, unless `DGMOE_EXACT_ACTIVATION` is 1.
"""

from __future__ import annotations

import torch

from ..formats.layouts import CONTIG_ALIGNMENT, ScaleLayout, ceil_div
from ._registry import fake_of
from .scale import _empty_scale


def silu_and_mul(
    gate_up: torch.Tensor,
    masked_m: torch.Tensor | None = None,
    m_indices: torch.Tensor | None = None,
    *,
    swiglu_limit: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
    gate_up_interleave: int = 0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `silu(gate) * up` between the GEMMs of the bf16 recipe, in either layout.

    Args:
        gate_up: (experts, m, 2 * intermediate) bfloat16 with `masked_m`, or (m, 2 * intermediate);
            any strides.
        masked_m: (experts,) int32, valid rows of each expert.
        m_indices: (m,) int32, the expert of a row or -1 for padding; None means that every row is
            valid.
        swiglu_limit: clamp gate from above and up from both sides, in fp32, first; None does not.
        gemm1_alpha: compute gpt-oss's `gate * sigmoid(alpha * gate) * (up + 1)` instead.
        gemm1_clamp_limit: with `gemm1_alpha`, the limit of the same clamp.
        gate_up_interleave: order of the columns of gate_up (and bias): 0, all of gate, all of up;
            8, eight of each in turn; 1, one of each in turn, as gpt-oss ships them.
        bias: (experts, 2 * intermediate) float32 or bfloat16, the bias of GEMM1, added in fp32.

    Returns:
        (.., intermediate) bfloat16. Computed in fp32, rounded once. Rows that are not valid are
        undefined.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size, or a parameter is out of range or
            does not go with the others.
    """
    return torch.ops.dgmoe.silu_and_mul(
        gate_up,
        masked_m,
        m_indices,
        swiglu_limit=swiglu_limit,
        gemm1_alpha=gemm1_alpha,
        gemm1_clamp_limit=gemm1_clamp_limit,
        gate_up_interleave=gate_up_interleave,
        bias=bias,
    )


@fake_of("silu_and_mul")
def _silu_and_mul_fake(gate_up, masked_m=None, m_indices=None, **_):
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _gated_quant_fake(gate_up, group_size=128, scale_layout=1, **_):
    *batch, rows, width = gate_up.shape
    inter = width // 2
    q = gate_up.new_empty((*batch, rows, inter), dtype=torch.float8_e4m3fn)
    groups = ceil_div(inter, group_size)
    return q, _empty_scale(gate_up, batch[0] if batch else None, rows, groups, scale_layout)


def silu_and_mul_post_quant_masked(
    gate_up: torch.Tensor,
    masked_m: torch.Tensor,
    *,
    group_size: int = 128,
    scale_layout: int = ScaleLayout.MN_MAJOR,
    round_scale: bool = False,
    round_activation: bool = False,
    swiglu_limit: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
    gate_up_interleave: int = 0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `silu(gate) * up` of a masked slab and quantise it to e4m3 in the same pass.

    Args:
        gate_up: (experts, m, 2 * intermediate) bfloat16, any strides.
        masked_m: (experts,) int32, valid rows of each expert.
        group_size, scale_layout, round_scale: as in `quant_group_fp8`.
        round_activation: round the product to bfloat16 before quantising, for parity with layers
            that do; by default it is quantised from fp32.
        swiglu_limit, gemm1_alpha, gemm1_clamp_limit: as in `silu_and_mul`.
        gate_up_interleave, bias: as in `silu_and_mul`.

    Returns:
        q (experts, m, intermediate) float8_e4m3fn and scale (experts, m, ceil(intermediate /
        group_size)) in `scale_layout`. Rows from masked_m[e] on are undefined; their scales are 1
        within the last valid row's tile of 128 rows.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size, or a parameter is out of range or
            does not go with the others.
    """
    return torch.ops.dgmoe.silu_and_mul_post_quant_masked(
        gate_up,
        masked_m,
        group_size=group_size,
        scale_layout=scale_layout,
        round_scale=round_scale,
        round_activation=round_activation,
        swiglu_limit=swiglu_limit,
        gemm1_alpha=gemm1_alpha,
        gemm1_clamp_limit=gemm1_clamp_limit,
        gate_up_interleave=gate_up_interleave,
        bias=bias,
    )


@fake_of("silu_and_mul_post_quant_masked")
def _silu_and_mul_post_quant_masked_fake(gate_up, masked_m, **kwargs):
    return _gated_quant_fake(gate_up, **kwargs)


def silu_and_mul_post_quant_contig(
    gate_up: torch.Tensor,
    m_indices: torch.Tensor | None = None,
    *,
    group_size: int = 128,
    scale_layout: int = ScaleLayout.MN_MAJOR,
    round_scale: bool = False,
    round_activation: bool = False,
    alignment: int = CONTIG_ALIGNMENT,
    swiglu_limit: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
    gate_up_interleave: int = 0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `silu(gate) * up` of contiguous segments and quantise it to e4m3 in the same pass.

    Args:
        gate_up: (m, 2 * intermediate) bfloat16, any strides.
        m_indices: (m,) int32, the expert of a row or -1 for padding; None means that every row is
            valid.
        group_size, scale_layout, round_scale, round_activation: as in
            `silu_and_mul_post_quant_masked`.
        alignment: rows to which segments are padded, a multiple of 4; each segment starts at a
            multiple of it.
        swiglu_limit, gemm1_alpha, gemm1_clamp_limit: as in `silu_and_mul`.
        gate_up_interleave, bias: as in `silu_and_mul`; a bias needs m_indices.

    Returns:
        q (m, intermediate) float8_e4m3fn and scale (m, ceil(intermediate / group_size)) in
        `scale_layout`. Padding rows are undefined; their scales are 1 where they share a tile of
        `alignment` rows with valid ones.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size, or a parameter is out of range or
            does not go with the others.
    """
    return torch.ops.dgmoe.silu_and_mul_post_quant_contig(
        gate_up,
        m_indices,
        group_size=group_size,
        scale_layout=scale_layout,
        round_scale=round_scale,
        round_activation=round_activation,
        alignment=alignment,
        swiglu_limit=swiglu_limit,
        gemm1_alpha=gemm1_alpha,
        gemm1_clamp_limit=gemm1_clamp_limit,
        gate_up_interleave=gate_up_interleave,
        bias=bias,
    )


@fake_of("silu_and_mul_post_quant_contig")
def _silu_and_mul_post_quant_contig_fake(gate_up, m_indices=None, **kwargs):
    return _gated_quant_fake(gate_up, **kwargs)


def situ_and_mul(
    gate_up: torch.Tensor,
    masked_m: torch.Tensor | None = None,
    m_indices: torch.Tensor | None = None,
    *,
    beta: float,
    linear_beta: float,
    gate_up_interleave: int = 0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute SiTU between the GEMMs of the bf16 recipe, in either layout.

    Kimi-K3's `beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)`.

    Args:
        gate_up: (experts, m, 2 * intermediate) bfloat16 with `masked_m`, or (m, 2 * intermediate);
            any strides.
        masked_m: (experts,) int32, valid rows of each expert.
        m_indices: (m,) int32, the expert of a row or -1 for padding; None means that every row is
            valid.
        beta, linear_beta: positive; where gate and up saturate.
        gate_up_interleave: order of the columns of gate_up (and bias): 0, all of gate, all of up;
            8, eight of each in turn; 1, one of each in turn, as gpt-oss ships them.
        bias: (experts, 2 * intermediate) float32 or bfloat16, the bias of GEMM1, added in fp32.

    Returns:
        (.., intermediate) bfloat16. Computed in fp32, rounded once. Rows that are not valid are
        undefined.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size, or a parameter is out of range or
            does not go with the others.
    """
    return torch.ops.dgmoe.situ_and_mul(
        gate_up,
        masked_m,
        m_indices,
        beta=beta,
        linear_beta=linear_beta,
        gate_up_interleave=gate_up_interleave,
        bias=bias,
    )


@fake_of("situ_and_mul")
def _situ_and_mul_fake(gate_up, masked_m=None, m_indices=None, **_):
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def situ_and_mul_post_quant_masked(
    gate_up: torch.Tensor,
    masked_m: torch.Tensor,
    *,
    beta: float,
    linear_beta: float,
    group_size: int = 128,
    scale_layout: int = ScaleLayout.MN_MAJOR,
    round_scale: bool = False,
    round_activation: bool = False,
    gate_up_interleave: int = 0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute SiTU of a masked slab and quantise it to e4m3 in the same pass.

    Args:
        gate_up: (experts, m, 2 * intermediate) bfloat16, any strides.
        masked_m: (experts,) int32, valid rows of each expert.
        beta, linear_beta: as in `situ_and_mul`.
        group_size, scale_layout, round_scale: as in `quant_group_fp8`.
        round_activation: round the product to bfloat16 before quantising, for parity with layers
            that do; by default it is quantised from fp32.
        gate_up_interleave, bias: as in `situ_and_mul`.

    Returns:
        q (experts, m, intermediate) float8_e4m3fn and scale (experts, m, ceil(intermediate /
        group_size)) in `scale_layout`. Rows from masked_m[e] on are undefined; their scales are 1
        within the last valid row's tile of 128 rows.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size, or a parameter is out of range or
            does not go with the others.
    """
    return torch.ops.dgmoe.situ_and_mul_post_quant_masked(
        gate_up,
        masked_m,
        beta=beta,
        linear_beta=linear_beta,
        group_size=group_size,
        scale_layout=scale_layout,
        round_scale=round_scale,
        round_activation=round_activation,
        gate_up_interleave=gate_up_interleave,
        bias=bias,
    )


@fake_of("situ_and_mul_post_quant_masked")
def _situ_and_mul_post_quant_masked_fake(gate_up, masked_m, **kwargs):
    return _gated_quant_fake(gate_up, **kwargs)


def situ_and_mul_post_quant_contig(
    gate_up: torch.Tensor,
    m_indices: torch.Tensor | None = None,
    *,
    beta: float,
    linear_beta: float,
    group_size: int = 128,
    scale_layout: int = ScaleLayout.MN_MAJOR,
    round_scale: bool = False,
    round_activation: bool = False,
    alignment: int = CONTIG_ALIGNMENT,
    gate_up_interleave: int = 0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute SiTU of contiguous segments and quantise it to e4m3 in the same pass.

    Args:
        gate_up: (m, 2 * intermediate) bfloat16, any strides.
        m_indices: (m,) int32, the expert of a row or -1 for padding; None means that every row is
            valid.
        beta, linear_beta: as in `situ_and_mul`.
        group_size, scale_layout, round_scale, round_activation: as in
            `situ_and_mul_post_quant_masked`.
        alignment: rows to which segments are padded, a multiple of 4; each segment starts at a
            multiple of it.
        gate_up_interleave, bias: as in `situ_and_mul`; a bias needs m_indices.

    Returns:
        q (m, intermediate) float8_e4m3fn and scale (m, ceil(intermediate / group_size)) in
        `scale_layout`. Padding rows are undefined; their scales are 1 where they share a tile of
        `alignment` rows with valid ones.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size, or a parameter is out of range or
            does not go with the others.
    """
    return torch.ops.dgmoe.situ_and_mul_post_quant_contig(
        gate_up,
        m_indices,
        beta=beta,
        linear_beta=linear_beta,
        group_size=group_size,
        scale_layout=scale_layout,
        round_scale=round_scale,
        round_activation=round_activation,
        alignment=alignment,
        gate_up_interleave=gate_up_interleave,
        bias=bias,
    )


@fake_of("situ_and_mul_post_quant_contig")
def _situ_and_mul_post_quant_contig_fake(gate_up, m_indices=None, **kwargs):
    return _gated_quant_fake(gate_up, **kwargs)
