"""Oracles of the gemm room: float64 products of dequantised operands, rounded to bf16 once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._float import ceil_div, decode_e4m3, on_cpu
from .permute import poison_rows, spread
from .scale import dequantized_scale


def dequantize(q: torch.Tensor, scale: torch.Tensor, gran_mn: int, gran_k: int) -> torch.Tensor:
    """Return float64 e4m3 values (.., mn, k) times the scale of their gran_mn x gran_k block."""
    mn, k = q.shape[-2:]
    spread_scale = dequantized_scale(scale, ceil_div(k, gran_k))
    spread_scale = spread_scale.repeat_interleave(gran_mn, dim=-2)[..., :mn, :]
    spread_scale = spread_scale.repeat_interleave(gran_k, dim=-1)[..., :k]
    return decode_e4m3(q.contiguous()) * spread_scale


def _operands(a, a_scale, b, b_scale, recipe_a, recipe_b) -> tuple[torch.Tensor, torch.Tensor]:
    gran_a = tuple(recipe_a or (1, 128))
    gran_b = tuple(recipe_b or (1 if b_scale.dtype == torch.int32 else 128, 128))
    return dequantize(a, a_scale, *gran_a), dequantize(b, b_scale, *gran_b)


def _by_expert(
    a: torch.Tensor, b: torch.Tensor, info: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a @ b^T of the valid rows in float64, NaN elsewhere, and the same of magnitudes."""
    exact = torch.full((*a.shape[:-1], b.shape[1]), float("nan"), dtype=torch.float64)
    magnitude = torch.zeros_like(exact)
    for expert in range(b.shape[0]):
        if a.dim() == 3:
            rows = (expert, slice(0, int(info[expert])))
        else:
            rows = (info == expert).nonzero()[:, 0]
        exact[rows] = a[rows].double() @ b[expert].double().T
        magnitude[rows] = a[rows].double().abs() @ b[expert].double().abs().T
    return exact, magnitude


def _valid(a: torch.Tensor, info: torch.Tensor) -> torch.Tensor:
    return torch.arange(a.shape[1]) < info.unsqueeze(-1) if a.dim() == 3 else info >= 0


def _rounded(exact: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    out = poison_rows(tuple(exact.shape), torch.bfloat16)
    out[valid] = exact[valid].bfloat16()
    return out


@on_cpu
def grouped_gemm_nt_f8f8bf16_terms(
    a, a_scale, b, b_scale, info, recipe_a=None, recipe_b=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float64 result and sum_k |a| |b|, which bounds the error of any summation."""
    return _by_expert(*_operands(a, a_scale, b, b_scale, recipe_a, recipe_b), info)


@on_cpu
def grouped_gemm_nt_bf16_terms(a, b, info) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float64 result and sum_k |a| |b|, which bounds the error of any summation."""
    return _by_expert(a, b, info)


@on_cpu
def grouped_gemm_nt_f8f8bf16_masked_ref(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    *,
    recipe_a: Sequence[int] | None = None,
    recipe_b: Sequence[int] | None = None,
) -> torch.Tensor:
    exact, _ = grouped_gemm_nt_f8f8bf16_terms(a, a_scale, b, b_scale, masked_m, recipe_a, recipe_b)
    return _rounded(exact, _valid(a, masked_m))


@on_cpu
def grouped_gemm_nt_f8f8bf16_contig_ref(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    *,
    recipe_a: Sequence[int] | None = None,
    recipe_b: Sequence[int] | None = None,
) -> torch.Tensor:
    exact, _ = grouped_gemm_nt_f8f8bf16_terms(a, a_scale, b, b_scale, m_indices, recipe_a, recipe_b)
    return _rounded(exact, _valid(a, m_indices))


@on_cpu
def grouped_gemm_nt_bf16_masked_ref(
    a: torch.Tensor, b: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> torch.Tensor:
    return _rounded(_by_expert(a, b, masked_m)[0], _valid(a, masked_m))


@on_cpu
def grouped_gemm_nt_bf16_contig_ref(
    a: torch.Tensor, b: torch.Tensor, m_indices: torch.Tensor
) -> torch.Tensor:
    return _rounded(_by_expert(a, b, m_indices)[0], _valid(a, m_indices))


def _mask(a: torch.Tensor, b: torch.Tensor, info: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = torch.empty((*a.shape[:-1], b.shape[1]))
    return (spread(_valid(a, info), out),)


@on_cpu
def grouped_gemm_nt_f8f8bf16_masked_defined(
    a, a_scale, b, b_scale, masked_m, expected_m, **recipes
) -> tuple[torch.Tensor, ...]:
    return _mask(a, b, masked_m)


@on_cpu
def grouped_gemm_nt_f8f8bf16_contig_defined(
    a, a_scale, b, b_scale, m_indices, **recipes
) -> tuple[torch.Tensor, ...]:
    return _mask(a, b, m_indices)


@on_cpu
def grouped_gemm_nt_bf16_masked_defined(a, b, masked_m, expected_m) -> tuple[torch.Tensor, ...]:
    return _mask(a, b, masked_m)


@on_cpu
def grouped_gemm_nt_bf16_contig_defined(a, b, m_indices) -> tuple[torch.Tensor, ...]:
    return _mask(a, b, m_indices)
