"""Oracles of the activation room: SiLU(gate) * up in fp32, and its group quantisation."""

from __future__ import annotations

import torch

from ._float import ceil_div, on_cpu, silu
from .permute import poison_rows, spread
from .scale import POISON, quantize_groups, scale_tensor, unit_words


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    inter = gate_up.shape[-1] // 2
    return silu(gate_up[..., :inter].float()) * gate_up[..., inter:].float()


def _valid(
    gate_up: torch.Tensor, masked_m: torch.Tensor | None, m_indices: torch.Tensor | None
) -> torch.Tensor:
    """Return which rows (experts, m) or (m,) are valid."""
    if masked_m is not None:
        return torch.arange(gate_up.shape[1]) < masked_m.unsqueeze(-1)
    if m_indices is not None:
        return m_indices >= 0
    return torch.ones(gate_up.shape[0], dtype=torch.bool)


def _tiles(valid: torch.Tensor, alignment: int) -> torch.Tensor:
    """Return which rows share a tile of `alignment` rows with a valid one."""
    m = valid.shape[-1]
    tiles = ceil_div(m, alignment)
    padded = torch.zeros((*valid.shape[:-1], tiles * alignment), dtype=torch.bool)
    padded[..., :m] = valid
    used = padded.view(*valid.shape[:-1], tiles, alignment).any(-1)
    return used.repeat_interleave(alignment, dim=-1)[..., :m]


@on_cpu
def silu_and_mul_ref(
    gate_up: torch.Tensor,
    masked_m: torch.Tensor | None = None,
    m_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    valid = _valid(gate_up, masked_m, m_indices)
    out = poison_rows((*gate_up.shape[:-1], gate_up.shape[-1] // 2), torch.bfloat16)
    out[valid] = _gated(gate_up[valid]).bfloat16()
    return out


@on_cpu
def silu_and_mul_defined(gate_up, masked_m=None, m_indices=None) -> tuple[torch.Tensor, ...]:
    valid = _valid(gate_up, masked_m, m_indices)
    return (spread(valid, gate_up[..., : gate_up.shape[-1] // 2]),)


@on_cpu
def silu_and_mul_bound(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return silu(gate) * up in float64 and how far a bf16 result may stand from it.

    e^x within 2 ulp, three more fp32 roundings and one to bf16; below -88 fp32 exp(-x) overflows.
    """
    inter = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :inter].double(), gate_up[..., inter:].double()
    exact = gate / (1 + torch.exp(-gate)) * up
    return exact, exact.abs() * (2.0**-8 + 2.0**-20) + up.abs() * 2.0**-121 + 2.0**-133


def _quantized(gate_up, valid, alignment, group_size, scale_form, round_scale, round_activation):
    inter = gate_up.shape[-1] // 2
    product = _gated(gate_up[valid])
    if round_activation:
        product = product.bfloat16().float()
    q, words = quantize_groups(product, group_size, scale_form, round_scale)
    rows = poison_rows((*gate_up.shape[:-1], inter), torch.float8_e4m3fn)
    rows.view(torch.uint8)[valid] = q
    placed = torch.full((*gate_up.shape[:-1], words.shape[-1]), POISON, dtype=torch.int32)
    placed[_tiles(valid, alignment)] = unit_words(ceil_div(inter, group_size), scale_form)
    placed[valid] = words
    return rows, scale_tensor(placed, scale_form)


@on_cpu
def silu_and_mul_post_quant_masked_ref(
    gate_up: torch.Tensor,
    masked_m: torch.Tensor,
    *,
    group_size: int = 128,
    scale_form: int = 1,
    round_scale: bool = False,
    round_activation: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    valid = _valid(gate_up, masked_m, None)
    return _quantized(gate_up, valid, 128, group_size, scale_form, round_scale, round_activation)


@on_cpu
def silu_and_mul_post_quant_contig_ref(
    gate_up: torch.Tensor,
    m_indices: torch.Tensor | None = None,
    *,
    group_size: int = 128,
    scale_form: int = 1,
    round_scale: bool = False,
    round_activation: bool = False,
    alignment: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    valid = _valid(gate_up, None, m_indices)
    return _quantized(
        gate_up, valid, alignment, group_size, scale_form, round_scale, round_activation
    )


@on_cpu
def silu_and_mul_post_quant_masked_defined(gate_up, masked_m, **kwargs) -> tuple[torch.Tensor, ...]:
    valid = _valid(gate_up, masked_m, None)
    q, scale = silu_and_mul_post_quant_masked_ref(gate_up, masked_m, **kwargs)
    return spread(valid, q), spread(_tiles(valid, 128), scale)


@on_cpu
def silu_and_mul_post_quant_contig_defined(
    gate_up, m_indices=None, *, alignment: int = 128, **kwargs
) -> tuple[torch.Tensor, ...]:
    valid = _valid(gate_up, None, m_indices)
    q, scale = silu_and_mul_post_quant_contig_ref(gate_up, m_indices, alignment=alignment, **kwargs)
    return spread(valid, q), spread(_tiles(valid, alignment), scale)
