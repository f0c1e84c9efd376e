"""GEMM room: grouped `a @ b^T` by expert, on a masked slab or on contiguous segments.

On CPU the kernels are ours; on CUDA DeepGEMM runs them (`dgmoe_ops.backends.deep_gemm`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backends import deep_gemm
from ._registry import fake_of

deep_gemm.register()


def grouped_gemm_nt_f8f8bf16_masked(
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
    """Multiply each expert's valid slab rows by its weight: `d[e, :masked_m[e]] = a[e] @ b[e]^T`.

    Args:
        a: (experts, m, k) float8_e4m3fn, contiguous.
        a_scale: (experts, m, groups) float32, or packed UE8M0 int32; any strides on CPU, MN-major
            on CUDA.
        b: (experts, n, k) float8_e4m3fn, contiguous.
        b_scale: (experts, ceil(n / 128), ceil(k / 128)) float32, or packed UE8M0 int32 (experts, n,
            ceil(k / 512)).
        masked_m: (experts,) int32, valid rows of each expert.
        expected_m: a hint at the rows an expert has, at least 1; it never changes the result.
        recipe_a, recipe_b: (rows, columns) that one scale covers, given together. Default (1, 128)
            and (128, 128), or (1, 128) twice where `b_scale` is packed.

    Returns:
        (experts, m, n) bfloat16; rows from masked_m[e] on hold no promise. fp32 accumulation, one
        rounding.

    Raises:
        ValueError: an argument has the wrong dtype, rank, size or scale form.
    """
    return torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_masked(
        a, a_scale, b, b_scale, masked_m, expected_m, recipe_a=recipe_a, recipe_b=recipe_b
    )


@fake_of("grouped_gemm_nt_f8f8bf16_masked")
def _grouped_gemm_nt_f8f8bf16_masked_fake(
    a, a_scale, b, b_scale, masked_m, expected_m, *, recipe_a=None, recipe_b=None
):
    return a.new_empty((a.shape[0], a.shape[1], b.shape[1]), dtype=torch.bfloat16)


def grouped_gemm_nt_f8f8bf16_contig(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    *,
    recipe_a: Sequence[int] | None = None,
    recipe_b: Sequence[int] | None = None,
) -> torch.Tensor:
    """Multiply each row by its expert's weight: `d[r] = a[r] @ b[m_indices[r]]^T`.

    Args:
        a: (m, k) float8_e4m3fn, contiguous.
        a_scale: (m, groups) float32, or packed UE8M0 int32; any strides on CPU, MN-major on CUDA.
        b, b_scale, recipe_a, recipe_b: as in `grouped_gemm_nt_f8f8bf16_masked`.
        m_indices: (m,) int32, the expert of each row, -1 for padding. An expert's rows stand
            together, in front of the padding of its segment.

    Returns:
        (m, n) bfloat16; rows with m_indices -1 hold no promise.

    Raises:
        ValueError: an argument has the wrong dtype, rank, size or scale form.
    """
    return torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_contig(
        a, a_scale, b, b_scale, m_indices, recipe_a=recipe_a, recipe_b=recipe_b
    )


@fake_of("grouped_gemm_nt_f8f8bf16_contig")
def _grouped_gemm_nt_f8f8bf16_contig_fake(
    a, a_scale, b, b_scale, m_indices, *, recipe_a=None, recipe_b=None
):
    return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)


def grouped_gemm_nt_bf16_masked(
    a: torch.Tensor, b: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> torch.Tensor:
    """Multiply each expert's valid slab rows by its weight, in bfloat16.

    Args:
        a: (experts, m, k) bfloat16, contiguous.
        b: (experts, n, k) bfloat16, contiguous.
        masked_m, expected_m: as in `grouped_gemm_nt_f8f8bf16_masked`.

    Returns:
        (experts, m, n) bfloat16; rows from masked_m[e] on hold no promise.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size.
    """
    return torch.ops.dgmoe.grouped_gemm_nt_bf16_masked(a, b, masked_m, expected_m)


@fake_of("grouped_gemm_nt_bf16_masked")
def _grouped_gemm_nt_bf16_masked_fake(a, b, masked_m, expected_m):
    return a.new_empty((a.shape[0], a.shape[1], b.shape[1]))


def grouped_gemm_nt_bf16_contig(
    a: torch.Tensor, b: torch.Tensor, m_indices: torch.Tensor
) -> torch.Tensor:
    """Multiply each row by its expert's weight, in bfloat16.

    Args:
        a: (m, k) bfloat16, contiguous.
        b: (experts, n, k) bfloat16, contiguous.
        m_indices: as in `grouped_gemm_nt_f8f8bf16_contig`.

    Returns:
        (m, n) bfloat16; rows with m_indices -1 hold no promise.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size.
    """
    return torch.ops.dgmoe.grouped_gemm_nt_bf16_contig(a, b, m_indices)


@fake_of("grouped_gemm_nt_bf16_contig")
def _grouped_gemm_nt_bf16_contig_fake(a, b, m_indices):
    return a.new_empty((a.shape[0], b.shape[1]))
