"""The stages of the layer that differ by layout, as named calls. Holds no numerics.

| stage | masked layout | contiguous layout |
|---|---|---|
| 2b place | moe_ep_deepgemm_preprocess | quant_group_fp8, ep_scatter |
| 3 GEMM1 | grouped_gemm_nt_*_masked | grouped_gemm_nt_*_contig |
| 4 activation | {silu,situ}_and_mul(_post_quant_masked) | {silu,situ}_and_mul(_post_quant_contig) |
| 5 GEMM2 | as GEMM1 | as GEMM1 |
| 6 combine | post_reorder_deepgemm | post_reorder_deepgemm |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from ..formats.layouts import Layout, ScaleLayout
from ..formats.recipes import Recipe, scale_recipes
from ..ops.activation import (
    silu_and_mul,
    silu_and_mul_post_quant_contig,
    silu_and_mul_post_quant_masked,
    situ_and_mul,
    situ_and_mul_post_quant_contig,
    situ_and_mul_post_quant_masked,
)
from ..ops.gemm import (
    grouped_gemm_nt_bf16_contig,
    grouped_gemm_nt_bf16_masked,
    grouped_gemm_nt_f8f8bf16_contig,
    grouped_gemm_nt_f8f8bf16_masked,
)
from ..ops.permute import ep_scatter, moe_ep_deepgemm_preprocess, quant_group_fp8
from .activations import ACTIVATIONS
from .checks import Between


class Placed(NamedTuple):
    """Tokens placed by expert: what stage 2b hands on."""

    rows: torch.Tensor
    scale: torch.Tensor | None
    index: torch.Tensor  #: the tensor `Layout.index_name`
    src2dst: torch.Tensor


class Stages(NamedTuple):
    """What every stage needs to know about the call."""

    recipe: Recipe
    layout: Layout
    form: ScaleLayout
    experts: int
    expert_start: int
    padded_hidden: int
    expected_m: int
    between: Between = Between()
    activation: Mapping[str, float | None] = MappingProxyType({})  #: keywords of its op


def _place_masked(stages: Stages, hidden_states: torch.Tensor, topk_ids: torch.Tensor) -> Placed:
    rows, scale, masked_m, src2dst = moe_ep_deepgemm_preprocess(
        hidden_states,
        topk_ids,
        stages.experts,
        expert_start=stages.expert_start,
        group_size=stages.recipe.group_size,
        scale_layout=stages.form,
        padded_k=stages.padded_hidden,
    )
    return Placed(rows, scale if stages.recipe.quantized else None, masked_m, src2dst)


def _place_contig(stages: Stages, hidden_states: torch.Tensor, topk_ids: torch.Tensor) -> Placed:
    recipe = stages.recipe
    if recipe.quantized:
        packed = stages.form == ScaleLayout.PACKED_UE8M0
        x, x_scale = quant_group_fp8(
            hidden_states,
            recipe.group_size,
            ScaleLayout.PACKED_UE8M0 if packed else ScaleLayout.ROW_MAJOR,
            padded_k=stages.padded_hidden,
        )
    else:
        pad = stages.padded_hidden - hidden_states.shape[1]
        x = torch.nn.functional.pad(hidden_states, (0, pad)) if pad else hidden_states
        x_scale = None
    rows, scale, m_indices, src2dst = ep_scatter(
        x,
        x_scale,
        topk_ids,
        stages.experts,
        expert_start=stages.expert_start,
        scale_layout=stages.form,
    )
    return Placed(rows, scale if recipe.quantized else None, m_indices, src2dst)


class LayoutOps(NamedTuple):
    """The ops of a layout."""

    place: Callable[[Stages, torch.Tensor, torch.Tensor], Placed]
    gemm_bf16: Callable[..., torch.Tensor]
    gemm_fp8: Callable[..., torch.Tensor]
    quantised_activation: Mapping[str, Callable]  #: by the family of the activation's ops


OPS: Mapping[Layout, LayoutOps] = {
    Layout.MASKED: LayoutOps(
        _place_masked,
        grouped_gemm_nt_bf16_masked,
        grouped_gemm_nt_f8f8bf16_masked,
        {
            "silu_and_mul": silu_and_mul_post_quant_masked,
            "situ_and_mul": situ_and_mul_post_quant_masked,
        },
    ),
    Layout.CONTIG: LayoutOps(
        _place_contig,
        grouped_gemm_nt_bf16_contig,
        grouped_gemm_nt_f8f8bf16_contig,
        {
            "silu_and_mul": silu_and_mul_post_quant_contig,
            "situ_and_mul": situ_and_mul_post_quant_contig,
        },
    ),
}
#: activations in bfloat16 take either layout's index tensor, by its name
_PLAIN_ACTIVATIONS = {"silu_and_mul": silu_and_mul, "situ_and_mul": situ_and_mul}


def weigh_input(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weigh what the experts read, before stage 2b.

    Returns a token for each slot of a token, (tokens * top_k, hidden); its one id; and the weights
    that are left for the results, all 1. A slot that is not routed here makes a row that nobody
    reads, whatever its weight is.
    """
    weighed = hidden_states.unsqueeze(1) * topk_weights.unsqueeze(-1)
    x = weighed.to(hidden_states.dtype).flatten(0, 1)
    ones = torch.ones(topk_weights.shape, dtype=torch.float32, device=topk_weights.device)
    return x, topk_ids.reshape(-1, 1), ones


def place(stages: Stages, hidden_states: torch.Tensor, topk_ids: torch.Tensor) -> Placed:
    """Stage 2b: quantise the tokens and place them by expert."""
    return OPS[stages.layout].place(stages, hidden_states, topk_ids)


def gemm(
    stages: Stages,
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    index: torch.Tensor,
) -> torch.Tensor:
    """Stages 3 and 5: multiply each expert's rows by its weight."""
    recipe, ops = stages.recipe, OPS[stages.layout]
    hint = (stages.expected_m,) if stages.layout.has_slabs else ()
    if not recipe.quantized:
        return ops.gemm_bf16(a, b, index, *hint)
    given = {}
    if recipe.mx:  # the others' is the GEMM's default
        pair = scale_recipes(recipe, recipe.group_size, a.shape[-1], a_scale.shape[-1])
        given = {"recipe_a": pair[0], "recipe_b": pair[1]}
    return ops.gemm_fp8(a, a_scale, b, b_scale, index, *hint, **given)


def activate(
    stages: Stages, gate_up: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stage 4: the gated activation, quantised for GEMM2."""
    between, layout = stages.between, stages.layout
    family = ACTIVATIONS[between.activation].op
    options = {
        **stages.activation,
        "gate_up_interleave": between.gate_up_interleave,
        "bias": between.bias,
    }
    if not stages.recipe.quantized:
        return _PLAIN_ACTIVATIONS[family](gate_up, **{layout.index_name: index}, **options), None
    return OPS[layout].quantised_activation[family](
        gate_up,
        index,
        group_size=stages.recipe.group_size,
        scale_layout=stages.form,
        round_activation=between.round_activation,
        **options,
    )
