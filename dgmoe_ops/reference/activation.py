"""Oracles of the activation room: the gated activations in fp32, and their group quantisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._float import ceil_div, gate, on_cpu, tanh
from .permute import poison_rows, spread
from .scale import POISON, quantize_groups, scale_tensor, unit_words


@dataclass(frozen=True)
class _Options:
    """What the ops of the room say besides rows and scales."""

    gate_up_interleave: int
    bias: torch.Tensor | None
    limit: float | None = None
    alpha: float | None = None
    betas: tuple[float, float] | None = None


def _silu(swiglu_limit, gemm1_alpha, gemm1_clamp_limit, gate_up_interleave, bias) -> _Options:
    limit = swiglu_limit if gemm1_alpha is None else gemm1_clamp_limit
    return _Options(gate_up_interleave, bias, limit, gemm1_alpha)


def _situ(beta, linear_beta, gate_up_interleave, bias) -> _Options:
    return _Options(gate_up_interleave, bias, betas=(beta, linear_beta))


def _split(columns: torch.Tensor, gate_up_interleave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up (.., intermediate) of (.., 2 * intermediate)."""
    inter = columns.shape[-1] // 2
    if gate_up_interleave == 0:
        return columns[..., :inter], columns[..., inter:]
    turns = columns.unflatten(-1, (inter // gate_up_interleave, 2, gate_up_interleave))
    return turns[..., 0, :].flatten(-2), turns[..., 1, :].flatten(-2)


def _gated(rows: torch.Tensor, experts: torch.Tensor, options: _Options) -> torch.Tensor:
    """Return the fp32 products of valid rows (n, 2 * intermediate) with their experts (n,)."""
    x = rows.float()
    if options.bias is not None:
        known = experts < options.bias.shape[0]
        x[known] = x[known] + options.bias[experts[known]].float()
    g, u = _split(x, options.gate_up_interleave)
    if options.limit is not None:
        limit = torch.tensor(options.limit, dtype=torch.float32)
        g = torch.where(g > limit, limit, g)
        u = torch.where(u > limit, limit, torch.where(u < -limit, -limit, u))
    if options.alpha is not None:
        return gate(g, torch.tensor(options.alpha, dtype=torch.float32) * g) * (u + 1)
    if options.betas is None:
        return gate(g, g) * u
    # As tensors: PyTorch would multiply by the reciprocal of a number.
    beta, linear = (torch.full_like(g, value) for value in options.betas)
    return gate(beta * tanh(g / beta), g) * (linear * tanh(u / linear))


def _valid(
    gate_up: torch.Tensor, masked_m: torch.Tensor | None, m_indices: torch.Tensor | None
) -> torch.Tensor:
    """Return which rows (experts, m) or (m,) are valid."""
    if masked_m is not None:
        return torch.arange(gate_up.shape[1]) < masked_m.unsqueeze(-1)
    if m_indices is not None:
        return m_indices >= 0
    return torch.ones(gate_up.shape[0], dtype=torch.bool)


def _experts(valid: torch.Tensor, m_indices: torch.Tensor | None) -> torch.Tensor:
    """Return the expert of each valid row, in order."""
    if valid.dim() == 2:
        return valid.nonzero()[:, 0]
    return torch.zeros(int(valid.sum())).long() if m_indices is None else m_indices[valid].long()


def _tiles(valid: torch.Tensor, alignment: int) -> torch.Tensor:
    """Return which rows share a tile of `alignment` rows with a valid one."""
    m = valid.shape[-1]
    tiles = ceil_div(m, alignment)
    padded = torch.zeros((*valid.shape[:-1], tiles * alignment), dtype=torch.bool)
    padded[..., :m] = valid
    used = padded.view(*valid.shape[:-1], tiles, alignment).any(-1)
    return used.repeat_interleave(alignment, dim=-1)[..., :m]


def _plain(gate_up, masked_m, m_indices, options: _Options) -> torch.Tensor:
    valid = _valid(gate_up, masked_m, m_indices)
    out = poison_rows((*gate_up.shape[:-1], gate_up.shape[-1] // 2), torch.bfloat16)
    out[valid] = _gated(gate_up[valid], _experts(valid, m_indices), options).bfloat16()
    return out


@on_cpu
def silu_and_mul_ref(
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
    options = _silu(swiglu_limit, gemm1_alpha, gemm1_clamp_limit, gate_up_interleave, bias)
    return _plain(gate_up, masked_m, m_indices, options)


@on_cpu
def situ_and_mul_ref(
    gate_up: torch.Tensor,
    masked_m: torch.Tensor | None = None,
    m_indices: torch.Tensor | None = None,
    *,
    beta: float,
    linear_beta: float,
    gate_up_interleave: int = 0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return _plain(gate_up, masked_m, m_indices, _situ(beta, linear_beta, gate_up_interleave, bias))


@on_cpu
def silu_and_mul_defined(gate_up, masked_m=None, m_indices=None, **_) -> tuple[torch.Tensor, ...]:
    valid = _valid(gate_up, masked_m, m_indices)
    return (spread(valid, gate_up[..., : gate_up.shape[-1] // 2]),)


situ_and_mul_defined = silu_and_mul_defined


@on_cpu
def flushed_activation(
    gate_up: torch.Tensor,
    *,
    gate_up_interleave: int = 0,
    bias: torch.Tensor | None = None,
    **parameters,
) -> torch.Tensor:
    """Return what a GPU may lose where it takes sigmoids below 2^-126 for zero, float64.

    The gate of such a product is at most 88 / alpha, or SiTU's beta.
    """
    _, u = _split(gate_up.double(), gate_up_interleave)
    if bias is not None and bias.numel():
        u = u.abs() + _split(bias.double(), gate_up_interleave)[1].abs().amax()
    alpha = parameters.get("gemm1_alpha")
    if alpha is not None:
        return (u.abs() + 1) * 2.0**-118 / max(abs(alpha), 2.0**-100)
    if "beta" in parameters:
        return torch.full_like(u, parameters["beta"] * parameters["linear_beta"] * 2.0**-124)
    return u.abs() * 2.0**-118


def _quantized(
    gate_up,
    valid,
    m_indices,
    alignment,
    group_size,
    scale_layout,
    round_scale,
    round_activation,
    options: _Options,
):
    inter = gate_up.shape[-1] // 2
    product = _gated(gate_up[valid], _experts(valid, m_indices), options)
    if round_activation:
        product = product.bfloat16().float()
    q, words = quantize_groups(product, group_size, scale_layout, round_scale)
    rows = poison_rows((*gate_up.shape[:-1], inter), torch.float8_e4m3fn)
    rows.view(torch.uint8)[valid] = q
    placed = torch.full((*gate_up.shape[:-1], words.shape[-1]), POISON, dtype=torch.int32)
    placed[_tiles(valid, alignment)] = unit_words(ceil_div(inter, group_size), scale_layout)
    placed[valid] = words
    return rows, scale_tensor(placed, scale_layout)


def _masked(gate_up, masked_m, quant: tuple, options: _Options):
    return _quantized(gate_up, _valid(gate_up, masked_m, None), None, 128, *quant, options)


def _contig(gate_up, m_indices, alignment, quant: tuple, options: _Options):
    valid = _valid(gate_up, None, m_indices)
    return _quantized(gate_up, valid, m_indices, alignment, *quant, options)


@on_cpu
def silu_and_mul_post_quant_masked_ref(
    gate_up: torch.Tensor,
    masked_m: torch.Tensor,
    *,
    group_size: int = 128,
    scale_layout: int = 1,
    round_scale: bool = False,
    round_activation: bool = False,
    swiglu_limit: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
    gate_up_interleave: int = 0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    quant = (group_size, scale_layout, round_scale, round_activation)
    options = _silu(swiglu_limit, gemm1_alpha, gemm1_clamp_limit, gate_up_interleave, bias)
    return _masked(gate_up, masked_m, quant, options)


@on_cpu
def situ_and_mul_post_quant_masked_ref(
    gate_up: torch.Tensor,
    masked_m: torch.Tensor,
    *,
    beta: float,
    linear_beta: float,
    group_size: int = 128,
    scale_layout: int = 1,
    round_scale: bool = False,
    round_activation: bool = False,
    gate_up_interleave: int = 0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    quant = (group_size, scale_layout, round_scale, round_activation)
    return _masked(gate_up, masked_m, quant, _situ(beta, linear_beta, gate_up_interleave, bias))


@on_cpu
def silu_and_mul_post_quant_contig_ref(
    gate_up: torch.Tensor,
    m_indices: torch.Tensor | None = None,
    *,
    group_size: int = 128,
    scale_layout: int = 1,
    round_scale: bool = False,
    round_activation: bool = False,
    alignment: int = 128,
    swiglu_limit: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
    gate_up_interleave: int = 0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    quant = (group_size, scale_layout, round_scale, round_activation)
    options = _silu(swiglu_limit, gemm1_alpha, gemm1_clamp_limit, gate_up_interleave, bias)
    return _contig(gate_up, m_indices, alignment, quant, options)


@on_cpu
def situ_and_mul_post_quant_contig_ref(
    gate_up: torch.Tensor,
    m_indices: torch.Tensor | None = None,
    *,
    beta: float,
    linear_beta: float,
    group_size: int = 128,
    scale_layout: int = 1,
    round_scale: bool = False,
    round_activation: bool = False,
    alignment: int = 128,
    gate_up_interleave: int = 0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    quant = (group_size, scale_layout, round_scale, round_activation)
    return _contig(
        gate_up, m_indices, alignment, quant, _situ(beta, linear_beta, gate_up_interleave, bias)
    )


def _quantized_defined(gate_up, valid, alignment, group_size=128, scale_layout=1, **_):
    inter = gate_up.shape[-1] // 2
    groups = ceil_div(inter, group_size)
    columns = unit_words(groups, scale_layout).numel()
    like = torch.empty(1).expand((*valid.shape, columns))
    return spread(valid, gate_up[..., :inter]), spread(_tiles(valid, alignment), like)


@on_cpu
def silu_and_mul_post_quant_masked_defined(gate_up, masked_m, **kwargs) -> tuple[torch.Tensor, ...]:
    return _quantized_defined(gate_up, _valid(gate_up, masked_m, None), 128, **kwargs)


@on_cpu
def silu_and_mul_post_quant_contig_defined(
    gate_up, m_indices=None, *, alignment: int = 128, **kwargs
) -> tuple[torch.Tensor, ...]:
    return _quantized_defined(gate_up, _valid(gate_up, None, m_indices), alignment, **kwargs)


situ_and_mul_post_quant_masked_defined = silu_and_mul_post_quant_masked_defined
situ_and_mul_post_quant_contig_defined = silu_and_mul_post_quant_contig_defined
