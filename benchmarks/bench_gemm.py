"""GEMM room: the first of the layer's two GEMMs, in both layouts and both dtypes."""

from __future__ import annotations

import functools

import torch

from benchmarks.cases import Builder, Case, Routed, check_slab, random_slab, routed
from benchmarks.inputs import bf16_weight, block_fp8_weight
from benchmarks.shapes import Shape
from dgmoe_ops.layouts import ScaleForm, expected_rows

# One entry: the cases of one op follow each other, and a second set of weights may not fit beside
# the first.
_fp8_weight = functools.lru_cache(maxsize=1)(block_fp8_weight)
_bf16_weight = functools.lru_cache(maxsize=1)(bf16_weight)


def forget_weights() -> None:
    """Free the weights that the last case left behind."""
    _fp8_weight.cache_clear()
    _bf16_weight.cache_clear()


def _fp8(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    _bf16_weight.cache_clear()
    return _fp8_weight(shape.experts, 2 * shape.intermediate, shape.hidden, device)


def _bf16(shape: Shape, device: torch.device) -> torch.Tensor:
    _fp8_weight.cache_clear()
    return _bf16_weight(shape.experts, 2 * shape.intermediate, shape.hidden, device)


def _case(shape: Shape, case: Routed, call, element_size: int) -> Case:
    """Count the used experts' weights, the routed rows and the result."""
    n, k = 2 * shape.intermediate, shape.hidden
    moved = (case.used * n * k + case.rows * k) * element_size + case.rows * n * 2
    return Case(call, moved, 2 * case.rows * n * k)


def _contig(shape: Shape, case: Routed, x: torch.Tensor, scale: torch.Tensor | None):
    return torch.ops.dgmoe.ep_scatter(x, scale, case.inputs.topk_ids, shape.experts)


def grouped_gemm_nt_f8f8bf16_masked(
    shape: Shape, tokens: int, device: torch.device, seed: int
) -> Case:
    case = routed(shape, tokens, device, seed)
    b, b_scale = _fp8(shape, device)
    expected_m = expected_rows(tokens, shape.top_k, shape.experts)
    check_slab(shape, case.slab, shape.hidden + 4 * shape.intermediate)
    a, a_scale, masked_m, _ = torch.ops.dgmoe.moe_ep_deepgemm_preprocess(
        case.inputs.hidden_states, case.inputs.topk_ids, shape.experts
    )
    run = torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_masked
    return _case(shape, case, lambda: run(a, a_scale, b, b_scale, masked_m, expected_m), 1)


def grouped_gemm_nt_f8f8bf16_contig(
    shape: Shape, tokens: int, device: torch.device, seed: int
) -> Case:
    case = routed(shape, tokens, device, seed)
    b, b_scale = _fp8(shape, device)
    x, x_scale = torch.ops.dgmoe.quant_group_fp8(
        case.inputs.hidden_states, 128, ScaleForm.ROW_MAJOR
    )
    a, a_scale, m_indices, _ = _contig(shape, case, x, x_scale)
    run = torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_contig
    return _case(shape, case, lambda: run(a, a_scale, b, b_scale, m_indices), 1)


def grouped_gemm_nt_bf16_masked(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    case = routed(shape, tokens, device, seed)
    b = _bf16(shape, device)
    a = random_slab(shape, case.slab, shape.hidden, device)
    expected_m = expected_rows(tokens, shape.top_k, shape.experts)
    run = torch.ops.dgmoe.grouped_gemm_nt_bf16_masked
    return _case(shape, case, lambda: run(a, b, case.counts, expected_m), 2)


def grouped_gemm_nt_bf16_contig(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    case = routed(shape, tokens, device, seed)
    b = _bf16(shape, device)
    a, _, m_indices, _ = _contig(shape, case, case.inputs.hidden_states, None)
    run = torch.ops.dgmoe.grouped_gemm_nt_bf16_contig
    return _case(shape, case, lambda: run(a, b, m_indices), 2)


OPS: dict[str, Builder] = {
    "grouped_gemm_nt_f8f8bf16_masked": grouped_gemm_nt_f8f8bf16_masked,
    "grouped_gemm_nt_f8f8bf16_contig": grouped_gemm_nt_f8f8bf16_contig,
    "grouped_gemm_nt_bf16_masked": grouped_gemm_nt_bf16_masked,
    "grouped_gemm_nt_bf16_contig": grouped_gemm_nt_bf16_contig,
}
