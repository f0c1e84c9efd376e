"""Layers as generators: each yields once after each of the five stages, the last time with the
result.

Stopping early gives the cost of a prefix; the difference of two prefixes is the cost of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.inputs import LayerInputs, LayerWeights
from dgmoe_ops.formats.layouts import Layout, expected_rows
from dgmoe_ops.formats.recipes import RECIPES
from dgmoe_ops.layer.stages import Stages, activate, gemm, place
from dgmoe_ops.ops import post_reorder_deepgemm

STAGES = ("pre", "gemm1", "act", "gemm2", "post")
Staged = Callable[[LayerInputs, LayerWeights], Iterator[torch.Tensor | None]]


def run_until(layer: Staged, stage: str, inputs: LayerInputs, weights: LayerWeights):
    """Run a layer up to and including a stage and return what that stage yields."""
    steps = layer(inputs, weights)
    for name in STAGES:
        value = next(steps)
        if name == stage:
            steps.close()
            return value
    raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {stage}")


def _ours(layout: str, inputs: LayerInputs, weights: LayerWeights) -> Iterator[torch.Tensor | None]:
    experts = weights.w13.shape[0]
    tokens, top_k = inputs.topk_ids.shape
    recipe = RECIPES[weights.recipe]
    stages = Stages(
        recipe=recipe,
        layout=Layout(layout),
        form=recipe.scale_layout(weights.w13_scale),
        experts=experts,
        expert_start=0,
        padded_hidden=recipe.columns_of(weights.w13),
        expected_m=expected_rows(tokens, top_k, experts),
    )
    rows, scale, index, src2dst = place(stages, inputs.hidden_states, inputs.topk_ids)
    yield None
    gate_up = gemm(stages, rows, scale, weights.w13, weights.w13_scale, index)
    del rows, scale
    yield None
    act, act_scale = activate(stages, gate_up, index)
    del gate_up
    yield None
    y = gemm(stages, act, act_scale, weights.w2, weights.w2_scale, index)
    del act, act_scale
    yield None
    yield post_reorder_deepgemm(
        y, src2dst, inputs.topk_weights, hidden_size=inputs.hidden_states.shape[1]
    )


def staged(layout: str) -> Staged:
    """Our layer as its named calls, in the masked or the contig layout."""
    return partial(_ours, layout)


def fused(layout: str, inputs: LayerInputs, weights: LayerWeights) -> torch.Tensor:
    """Our layer as the one op that users call."""
    return torch.ops.dgmoe.fused_moe(
        inputs.hidden_states,
        inputs.topk_weights,
        inputs.topk_ids,
        weights.w13,
        weights.w13_scale,
        weights.w2,
        weights.w2_scale,
        recipe=weights.recipe,
        layout=layout,
    )


def _fp8_rounded(x: torch.Tensor, columns: int, power_of_two: bool) -> torch.Tensor:
    grouped = x.unflatten(-1, (-1, columns))
    scale = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    rounded = (grouped / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn)
    return (rounded.double() * scale).flatten(-2)


def _bf16_rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x


def _values(weight: torch.Tensor) -> torch.Tensor:
    if weight.dtype != torch.int8:
        return weight.double()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=weight.device).double()
    codes = weight.view(torch.uint8).long()
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return torch.cat((magnitudes, -magnitudes))[pairs]


def _wide(weight: torch.Tensor, scale: torch.Tensor | None, expert: int) -> torch.Tensor:
    wide = _values(weight[expert])
    if scale is None:
        return wide
    if scale.dtype == torch.int32:  # four exponents of 32 columns each
        shifts = torch.arange(0, 32, 8, device=scale.device)
        exponents = (scale[expert].unsqueeze(-1) >> shifts & 255).flatten(-2)
        factors = torch.exp2(exponents.double() - 127)
        return wide * factors.repeat_interleave(32, 1)[:, : wide.shape[1]]
    blocks = scale[expert].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return wide * blocks[: wide.shape[0], : wide.shape[1]]


def reference(
    inputs: LayerInputs, weights: LayerWeights, tokens: list[int], round_activations: bool
) -> torch.Tensor:
    """Compute the layer for a few tokens in float64, from the weights as stored.

    With `round_activations` values are rounded where the recipe rounds them (tokens and activation
    to fp8 groups, results of a stage to bfloat16): what remains is the order of summation. Without,
    the difference is what the recipe costs in accuracy.
    """
    recipe = RECIPES[weights.recipe]
    between = _bf16_rounded if round_activations else _exact
    rounded = between
    if round_activations and recipe.quantized:
        packed = weights.w13_scale.dtype == torch.int32
        rounded = partial(_fp8_rounded, columns=recipe.group_size, power_of_two=packed)
    out = torch.zeros(
        len(tokens), weights.w2.shape[1], device=weights.w2.device, dtype=torch.float64
    )
    for i, token in enumerate(tokens):
        x = rounded(inputs.hidden_states[token].double())
        for slot, expert in enumerate(inputs.topk_ids[token].tolist()):
            gate, up = between(_wide(weights.w13, weights.w13_scale, expert) @ x).chunk(2)
            act = rounded(torch.nn.functional.silu(gate) * up)
            y = between(_wide(weights.w2, weights.w2_scale, expert) @ act)
            out[i] += y * inputs.topk_weights[token, slot].double()
    return out


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The Frobenius norm of the difference over that of `want`, in float64; NaN where anything is
    NaN.
    """
    want = want.double()
    return ((got.double() - want).norm() / want.norm()).item()
