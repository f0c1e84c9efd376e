"""The models that the benchmarks measure, and the floor that they and a GPU's rates imply."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dgmoe_ops.analysis.gpus import Gpu

OP_TOKENS = (8, 512, 4096)
LAYER_TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
CPU_TOKENS = (1, 8)


@dataclass(frozen=True)
class Shape:
    """The sizes of one MoE layer, all of its local experts counted."""

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int

    @property
    def weights_per_expert(self) -> int:
        """Elements of one expert's w13 and w2."""
        return 3 * self.hidden * self.intermediate


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("deepseek-v3", experts=256, hidden=7168, intermediate=2048, top_k=8),
        Shape("deepseek-v3-ep8", experts=32, hidden=7168, intermediate=2048, top_k=8),
        Shape("qwen3-30b-a3b", experts=128, hidden=2048, intermediate=768, top_k=8),
        Shape("qwen3.5-35b-a3b", experts=256, hidden=2048, intermediate=512, top_k=8),
        Shape("qwen3-next", experts=512, hidden=2048, intermediate=512, top_k=10),
        Shape("tiny", experts=4, hidden=256, intermediate=128, top_k=2),
    )
}

#: Bytes of a weight; a scale of 32 weights is a byte, that of a block is left out.
WEIGHT_BYTES = {"bf16": 2, "fp8_block": 1, "mxfp8": 1 + 1 / 32, "mxfp4": 1 / 2 + 1 / 32}


def floor_us(
    shape: Shape, used_experts: float, rows: float, gpu: Gpu, recipe: str = "fp8_block"
) -> float:
    """Compute the microseconds below which no layer of this shape can run on this GPU.

    The larger of two times: reading the weights of the experts that have a row, once; and the
    multiply-adds of the routed rows, at the peak rate. Activations and scales are left out: both
    are small beside the larger term.

    Args:
        used_experts: experts with at least one row.
        rows: routed (token, expert) pairs.
        recipe: says how many bytes a weight has, its scale included.
    """
    weight_bytes = used_experts * shape.weights_per_expert * WEIGHT_BYTES[recipe]
    flops = 2 * rows * shape.weights_per_expert
    peak = gpu.flops(recipe != "bf16")
    return 1e6 * max(weight_bytes / gpu.hbm_bytes_per_s, flops / peak)


def routing_floor_us(
    shape: Shape, topk_ids: torch.Tensor, gpu: Gpu, recipe: str = "fp8_block"
) -> float:
    """Compute `floor_us` of one routing, all of whose ids are local."""
    return floor_us(shape, topk_ids.unique().numel(), topk_ids.numel(), gpu, recipe)
