"""Activation room: the gated activation of GEMM1's output, with a real routing's row counts."""

from __future__ import annotations

import torch

from benchmarks.cases import Builder, Case, groups, random_slab, routed
from benchmarks.shapes import Shape

BETAS = {"beta": 4.0, "linear_beta": 25.0}


def _plain(op: str, parameters: dict) -> Builder:
    def build(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
        case = routed(shape, tokens, device, seed)
        gate_up = random_slab(shape, case.slab, 2 * shape.intermediate, device)
        run = getattr(torch.ops.dgmoe, op)
        call = lambda: run(gate_up, case.counts, **parameters)  # noqa: E731
        return Case(call, case.rows * 3 * shape.intermediate * 2)

    return build


def _quantised_bytes(shape: Shape, rows: int, tile_rows: int) -> int:
    scales = tile_rows * groups(shape.intermediate) * 4
    return rows * (2 * 2 + 1) * shape.intermediate + scales


def _masked(op: str, parameters: dict) -> Builder:
    def build(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
        case = routed(shape, tokens, device, seed)
        gate_up = random_slab(shape, case.slab, 2 * shape.intermediate, device)
        run = getattr(torch.ops.dgmoe, op)
        moved = _quantised_bytes(shape, case.rows, case.tile_rows)
        return Case(lambda: run(gate_up, case.counts, **parameters), moved)

    return build


def _contig(op: str, parameters: dict) -> Builder:
    def build(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
        case = routed(shape, tokens, device, seed)
        placed = torch.ops.dgmoe.ep_scatter(
            case.inputs.hidden_states, None, case.inputs.topk_ids, shape.experts
        )
        m_indices = placed[2]
        width = 2 * shape.intermediate
        gate_up = torch.randn(m_indices.shape[0], width, device=device, dtype=torch.bfloat16)
        run = getattr(torch.ops.dgmoe, op)
        moved = _quantised_bytes(shape, case.rows, case.tile_rows) + m_indices.numel() * 4
        return Case(lambda: run(gate_up, m_indices, **parameters), moved)

    return build


OPS: dict[str, Builder] = {
    "silu_and_mul": _plain("silu_and_mul", {}),
    "silu_and_mul_post_quant_masked": _masked("silu_and_mul_post_quant_masked", {}),
    "silu_and_mul_post_quant_contig": _contig("silu_and_mul_post_quant_contig", {}),
    "situ_and_mul": _plain("situ_and_mul", BETAS),
    "situ_and_mul_post_quant_masked": _masked("situ_and_mul_post_quant_masked", BETAS),
    "situ_and_mul_post_quant_contig": _contig("situ_and_mul_post_quant_contig", BETAS),
}
