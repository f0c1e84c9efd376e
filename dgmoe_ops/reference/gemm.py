"""Oracles of the gemm room: float64 products of dequantised operands, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._float import ceil_div, decode_e2m1, decode_e4m3, on_cpu
from .permute import poison_rows, spread
from .scale import dequantized_scale


def decode_values(q: torch.Tensor) -> torch.Tensor:
    """Return float64 of e4m3 values, or of int8 that holds two e2m1 codes, the low nibble first."""
    if q.dtype != torch.int8:
        return decode_e4m3(q.contiguous())
    byte = q.view(torch.uint8).long()
    return decode_e2m1(torch.stack((byte % 16, byte // 16), dim=-1).flatten(-2)).double()


def dequantize(q: torch.Tensor, scale: torch.Tensor, gran_mn: int, gran_k: int) -> torch.Tensor:
    """Return float64 values (.., mn, k) times the scale of their gran_mn x gran_k block."""
    values = decode_values(q)
    mn, k = values.shape[-2:]
    spread_scale = dequantized_scale(scale, ceil_div(k, gran_k))
    spread_scale = spread_scale.repeat_interleave(gran_mn, dim=-2)[..., :mn, :]
    spread_scale = spread_scale.repeat_interleave(gran_k, dim=-1)[..., :k]
    return values * spread_scale


def _operands(a, a_scale, b, b_scale, recipe_a, recipe_b) -> tuple[torch.Tensor, torch.Tensor]:
    gran_a = tuple(recipe_a or (1, 128))
    columns_b = 32 if b.dtype == torch.int8 else 128
    gran_b = tuple(recipe_b or (1 if b_scale.dtype == torch.int32 else 128, columns_b))
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
    operands = _operands(a, a_scale, b, b_scale, recipe_a, recipe_b)
    return _rounded(_by_expert(*operands, masked_m)[0], _valid(a, masked_m))


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
    operands = _operands(a, a_scale, b, b_scale, recipe_a, recipe_b)
    return _rounded(_by_expert(*operands, m_indices)[0], _valid(a, m_indices))


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


def _product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a @ b^T in float64, and the same of magnitudes."""
    return a.double() @ b.double().T, a.double().abs() @ b.double().abs().T


@on_cpu
def gemm_nt_f8f8bf16_ref(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    recipe_a: Sequence[int] | None = None,
    recipe_b: Sequence[int] | None = None,
) -> torch.Tensor:
    return _product(*_operands(a, a_scale, b, b_scale, recipe_a, recipe_b))[0].bfloat16()


@on_cpu
def gemm_nt_mxfp8_f8f8bf16_ref(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor
) -> torch.Tensor:
    return _product(*_operands(a, a_scale, b, b_scale, (1, 32), (1, 32)))[0].bfloat16()


@on_cpu
def gemm_nt_bf16bf16f32_ref(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _product(a, b)[0].float()


def _pieces(k: int, num_splits: int) -> list[list[int]]:
    """Return the columns of each piece: runs of 64-wide blocks, the first ones the longer."""
    blocks = torch.arange(ceil_div(k, 64)).tensor_split(num_splits)
    columns = torch.arange(k)
    return [columns[torch.isin(columns // 64, piece)].tolist() for piece in blocks]


def _hc_terms(
    x: torch.Tensor, fn: torch.Tensor, num_splits: int | None
) -> tuple[torch.Tensor, ...]:
    """Return both outputs in float64, each followed by its sum of magnitudes."""
    exact, magnitude, squares = [], [], []
    for columns in _pieces(x.shape[1], num_splits or 1):
        one, other = _product(x[:, columns], fn[:, columns])
        exact.append(one)
        magnitude.append(other)
        squares.append(x[:, columns].double().square().sum(-1))
    terms = [torch.stack(parts) for parts in (exact, magnitude, squares, squares)]
    return tuple(t if num_splits is not None else t[0] for t in terms)


@on_cpu
def tf32_hc_prenorm_gemm_ref(
    x: torch.Tensor, fn: torch.Tensor, *, num_splits: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    exact, _, squares, _ = _hc_terms(x, fn, num_splits)
    return exact.float(), squares.float()


@on_cpu
def gemm_terms(*args, op: str, **kwargs) -> tuple[torch.Tensor, ...]:
    """Return the float64 results of `dgmoe::<op>`, each followed by sum_k |a| |b|.

    The latter bounds the error of any summation.
    """
    if op == "tf32_hc_prenorm_gemm":
        return _hc_terms(*args, kwargs.get("num_splits"))
    if "f8f8" in op:
        grains = ((1, 32), (1, 32)) if "mxfp8" in op else (None, None)
        recipe_a, recipe_b = kwargs.get("recipe_a", grains[0]), kwargs.get("recipe_b", grains[1])
        operands, rest = _operands(*args[:4], recipe_a, recipe_b), args[4:]
    else:
        operands, rest = args[:2], args[2:]
    return _by_expert(*operands, rest[0]) if rest else _product(*operands)


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
