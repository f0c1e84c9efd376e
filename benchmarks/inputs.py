"""Random inputs of a layer, generated on the device that they are measured on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.shapes import Shape
from dgmoe_ops import prepare_weights


@dataclass(frozen=True)
class LayerInputs:
    """What changes from call to call."""

    hidden_states: torch.Tensor  # (tokens, hidden) bfloat16
    topk_weights: torch.Tensor  # (tokens, top_k) float32, rows sum to 1
    topk_ids: torch.Tensor  # (tokens, top_k) int32


@dataclass(frozen=True)
class LayerWeights:
    """Weights in the form of one recipe; the scales are None for bf16."""

    recipe: str
    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def layer_inputs(shape: Shape, tokens: int, device: torch.device, seed: int = 0) -> LayerInputs:
    """Draw tokens and a softmax routing without duplicate experts."""
    rng = generator(device, seed)
    x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16, generator=rng)
    logits = torch.randn(tokens, shape.experts, device=device, generator=rng)
    weights, ids = logits.softmax(-1).topk(shape.top_k, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    return LayerInputs(x, weights.contiguous(), ids.int().contiguous())


def block_fp8_weight(
    experts: int, n: int, k: int, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one GEMM's weights and quantise them an expert at a time: the bf16 whole would be twice
    the memory.
    """
    rng = generator(device, seed)
    weight = torch.empty(experts, n, k, device=device, dtype=torch.float8_e4m3fn)
    scales = []
    for e in range(experts):
        wide = torch.randn(n, k, device=device, dtype=torch.bfloat16, generator=rng) * k**-0.5
        quantised, scale = torch.ops.dgmoe.quant_block_fp8(wide, False)
        weight[e] = quantised
        scales.append(scale)
    return weight, torch.stack(scales)


def fp8_weights(shape: Shape, device: torch.device, seed: int = 0) -> LayerWeights:
    """Draw the weights of a layer in the fp8_block recipe."""
    w13 = block_fp8_weight(shape.experts, 2 * shape.intermediate, shape.hidden, device, seed)
    w2 = block_fp8_weight(shape.experts, shape.hidden, shape.intermediate, device, seed + 1)
    return LayerWeights("fp8_block", *w13, *w2)


def bf16_weight(experts: int, n: int, k: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Draw one GEMM's weights in bfloat16."""
    rng = generator(device, seed)
    weight = torch.empty(experts, n, k, device=device, dtype=torch.bfloat16)
    return weight.normal_(std=k**-0.5, generator=rng)


def bf16_weights(shape: Shape, device: torch.device, seed: int = 0) -> LayerWeights:
    """Draw the weights of a layer in the bf16 recipe."""
    w13 = bf16_weight(shape.experts, 2 * shape.intermediate, shape.hidden, device, seed)
    w2 = bf16_weight(shape.experts, shape.hidden, shape.intermediate, device, seed + 1)
    return LayerWeights("bf16", w13, None, w2, None)


def mx_weights(recipe: str, shape: Shape, device: torch.device, seed: int = 0) -> LayerWeights:
    """Draw the weights of a layer in bfloat16 and prepare them for an MX recipe, an expert at a
    time.
    """
    plain = bf16_weights(shape, device, seed)
    prepared = prepare_weights(plain.w13, None, plain.w2, None, recipe, "sm90", progress=False)
    return LayerWeights(recipe, *prepared.tensors)


def weights_of(recipe: str, shape: Shape, device: torch.device, seed: int = 0) -> LayerWeights:
    """Draw the weights of a layer in a recipe."""
    if recipe == "fp8_block":
        return fp8_weights(shape, device, seed)
    if recipe == "bf16":
        return bf16_weights(shape, device, seed)
    return mx_weights(recipe, shape, device, seed)


def rotating(first_bytes: int, device: torch.device) -> int:
    """Choose how many input sets keep a repeated measurement out of the last-level cache.

    A GPU's L2 holds some tens of megabytes, so the sets together should be a few times that.
    """
    if device.type == "cpu":
        return 2
    return max(2, min(16, -(-(256 << 20) // max(1, first_bytes))))
