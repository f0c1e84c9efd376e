"""GEMM room: the first of the layer's two GEMMs, in both layouts and both dtypes; that of one
shared expert; the router's; the mapping of hyper-connections.
"""

from __future__ import annotations

import functools

import torch

from benchmarks.cases import Builder, Case, Routed, check_slab, random_slab, routed
from benchmarks.inputs import bf16_weight, block_fp8_weight, generator, layer_inputs
from benchmarks.shapes import Shape
from dgmoe_ops.formats.layouts import ScaleLayout, expected_rows

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
        case.inputs.hidden_states, 128, ScaleLayout.ROW_MAJOR
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


def _dense_case(call, m: int, n: int, k: int, sizes: tuple[int, int, int]) -> Case:
    """Count both operands and the result, `sizes` bytes an element each."""
    return Case(call, m * k * sizes[0] + n * k * sizes[1] + m * n * sizes[2], 2 * m * n * k)


def gemm_nt_f8f8bf16(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    x = layer_inputs(shape, tokens, device, seed).hidden_states
    n, k = 2 * shape.intermediate, shape.hidden
    b, b_scale = (t[0] for t in block_fp8_weight(1, n, k, device, seed))
    a, a_scale = torch.ops.dgmoe.quant_group_fp8(x, 128, ScaleLayout.MN_MAJOR)
    run = torch.ops.dgmoe.gemm_nt_f8f8bf16
    return _dense_case(lambda: run(a, a_scale, b, b_scale), tokens, n, k, (1, 1, 2))


def gemm_nt_mxfp8_f8f8bf16(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    x = layer_inputs(shape, tokens, device, seed).hidden_states
    n, k = 2 * shape.intermediate, shape.hidden
    weight = bf16_weight(1, n, k, device, seed)[0]
    quantize = torch.ops.dgmoe.quant_group_fp8
    a, a_scale = quantize(x, 32, ScaleLayout.PACKED_UE8M0)
    b, b_scale = quantize(weight, 32, ScaleLayout.PACKED_UE8M0)
    run = torch.ops.dgmoe.gemm_nt_mxfp8_f8f8bf16
    return _dense_case(lambda: run(a, a_scale, b, b_scale), tokens, n, k, (1, 1, 2))


def gemm_nt_bf16bf16f32(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    a = layer_inputs(shape, tokens, device, seed).hidden_states
    n, k = shape.experts, shape.hidden
    b = bf16_weight(1, n, k, device, seed)[0]
    run = torch.ops.dgmoe.gemm_nt_bf16bf16f32
    return _dense_case(lambda: run(a, b), tokens, n, k, (2, 2, 4))


def tf32_hc_prenorm_gemm(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    """Four streams a token; two mappings of four, one of four by four."""
    streams = 4
    n, k = streams * (streams + 2), streams * shape.hidden
    rng = generator(device, seed)
    x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16, generator=rng)
    fn = torch.randn(n, k, device=device, generator=rng) * k**-0.5
    run = torch.ops.dgmoe.tf32_hc_prenorm_gemm
    case = _dense_case(lambda: run(x, fn), tokens, n, k, (2, 4, 4))
    return Case(case.call, case.bytes + 4 * tokens, case.flops + 2 * tokens * k)


OPS: dict[str, Builder] = {
    "gemm_nt_f8f8bf16": gemm_nt_f8f8bf16,
    "gemm_nt_mxfp8_f8f8bf16": gemm_nt_mxfp8_f8f8bf16,
    "gemm_nt_bf16bf16f32": gemm_nt_bf16bf16f32,
    "tf32_hc_prenorm_gemm": tf32_hc_prenorm_gemm,
    "grouped_gemm_nt_f8f8bf16_masked": grouped_gemm_nt_f8f8bf16_masked,
    "grouped_gemm_nt_f8f8bf16_contig": grouped_gemm_nt_f8f8bf16_contig,
    "grouped_gemm_nt_bf16_masked": grouped_gemm_nt_bf16_masked,
    "grouped_gemm_nt_bf16_contig": grouped_gemm_nt_bf16_contig,
}
