"""The models that the benchmarks measure, the rates of GPUs, and the floor that both imply."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


@dataclass(frozen=True)
class GpuRates:
    """Peak rates of a GPU; arithmetic is dense, half of what a datasheet quotes with sparsity."""

    name: str
    hbm_bytes_per_s: float
    fp8_flops: float
    bf16_flops: float
    source: str


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

# The first entry whose name is contained in the device's name counts, so longer names stand first.
GPU_RATES = (
    GpuRates("NVIDIA H200 NVL", 4.8e12, 1671e12, 836e12, "NVIDIA H200 datasheet, NVL column"),
    GpuRates("NVIDIA H200", 4.8e12, 1979e12, 989e12, "NVIDIA H200 datasheet, SXM column"),
    GpuRates("NVIDIA H100 PCIe", 2.0e12, 1513e12, 756e12, "NVIDIA H100 datasheet, PCIe column"),
    GpuRates("NVIDIA H100", 3.35e12, 1979e12, 989e12, "NVIDIA H100 datasheet, SXM column"),
    GpuRates("NVIDIA B200", 8.0e12, 4500e12, 2250e12, "NVIDIA DGX B200 datasheet, an eighth"),
)


def gpu_rates(device_name: str) -> GpuRates | None:
    """Look up the rates of a device by its name; None where the table has no entry."""
    return next((rates for rates in GPU_RATES if rates.name in device_name), None)


def floor_us(
    shape: Shape, used_experts: float, rows: float, rates: GpuRates, recipe: str = "fp8_block"
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
    peak = rates.bf16_flops if recipe == "bf16" else rates.fp8_flops
    return 1e6 * max(weight_bytes / rates.hbm_bytes_per_s, flops / peak)


def routing_floor_us(
    shape: Shape, topk_ids: torch.Tensor, rates: GpuRates, recipe: str = "fp8_block"
) -> float:
    """Compute `floor_us` of one routing, all of whose ids are local."""
    return floor_us(shape, topk_ids.unique().numel(), topk_ids.numel(), rates, recipe)
