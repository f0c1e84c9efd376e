"""The layer: the stages in order. Registers `dgmoe::fused_moe`."""

from __future__ import annotations

import torch

from ..formats.layouts import Layout, LayoutFacts, choose_layout, expected_rows
from ..formats.recipes import Recipe
from ..ops._registry import NAMESPACE, fake_of
from ..ops.combine import post_reorder_deepgemm
from .checks import Arguments, Between, check_layer, check_out, check_stand_ins_of_layer
from .device import check_alignment, device_name, device_of
from .stages import Stages, activate, gemm, place, weigh_input


def resolve_layout(
    layout: str,
    tokens: int,
    top_k: int,
    w13: torch.Tensor,
    w2: torch.Tensor,
    recipe: Recipe,
    legal: tuple[Layout, ...] = tuple(Layout),
) -> Layout:
    """The layout that a call takes; `layouts.explain_layout` says why."""
    if layout != "auto":
        return Layout(layout)
    device = device_of(w13.device)
    sizes = w13.shape[0], recipe.columns_of(w13), recipe.columns_of(w2)
    memory, name = device.memory_bytes, device_name(device)
    return choose_layout(
        LayoutFacts(layout, tokens, top_k, *sizes, recipe.quantized, memory, legal, name)
    )


def fused_moe_inline(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    *,
    recipe: str = "fp8_block",
    num_experts: int | None = None,
    expert_start: int = 0,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    gemm1_alpha: float | None = 1.702,
    gemm1_clamp_limit: float | None = 7.0,
    beta: float | None = None,
    linear_beta: float | None = None,
    gate_up_interleave: int = 0,
    round_activation: bool = False,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    apply_router_weight_on_input: bool = False,
    layout: str = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the layer as its named calls, traceable: for export and for fusing around.

    Arguments, result and bits are those of `fused_moe`, which is one opaque node in a graph.

    Where a graph serves many token counts, `layout="auto"` chooses once for all, without a guard:
    masked where the range of the tokens has an end and the slab of the most tokens fits, as under
    `mark_dynamic(x, 0, max=512)` or `Dim("tokens", max=512)`, else contig, which is right and fits
    for any number. `fused_moe` chooses at every call, and so may take the other layout, which may
    round the MX recipes differently on SM90; a named layout and `DGMOE_LAYOUT` hold in both.
    `out`, a contiguous buffer like hidden_states, takes the result where it is given. It may be
    hidden_states itself, which is read before anything is written, and shares no memory with
    another argument.
    """
    between = Between(
        activation,
        swiglu_limit,
        gemm1_alpha,
        gemm1_clamp_limit,
        beta,
        linear_beta,
        gate_up_interleave,
        round_activation,
        w13_bias,
    )
    given = Arguments(
        hidden_states,
        topk_weights,
        topk_ids,
        w13,
        w13_scale,
        w2,
        w2_scale,
        recipe,
        num_experts,
        expert_start,
        between,
        w2_bias,
        routed_scaling_factor,
        layout,
    )
    checked = check_layer(given)
    if out is not None:
        check_out(out, given)
    hidden = hidden_states.shape[1]
    x, ids, weights = hidden_states, topk_ids, topk_weights
    if apply_router_weight_on_input:
        x, ids, weights = weigh_input(x, weights, ids)
    tokens, top_k = ids.shape
    chosen = resolve_layout(layout, tokens, top_k, w13, w2, checked.recipe, checked.legal)
    if not torch.compiler.is_compiling():  # the scopes are those of the run, not of the trace
        check_alignment(checked.device, chosen)
    stages = Stages(
        recipe=checked.recipe,
        layout=chosen,
        form=checked.recipe.scale_layout(w13_scale),
        experts=w13.shape[0],
        expert_start=expert_start,
        padded_hidden=checked.recipe.columns_of(w13),
        expected_m=expected_rows(tokens, top_k, checked.num_experts),
        between=between,
        activation=checked.activation,
    )
    # Each intermediate is dropped as soon as the next stage has read it: the peak is one GEMM's
    # input and output.
    rows, scale, index, src2dst = place(stages, x, ids)
    del x, ids
    gate_up = gemm(stages, rows, scale, w13, w13_scale, index)
    del rows, scale
    act, act_scale = activate(stages, gate_up, index)
    del gate_up
    y = gemm(stages, act, act_scale, w2, w2_scale, index)
    del act, act_scale
    return post_reorder_deepgemm(
        y,
        src2dst.view(topk_ids.shape),
        weights,
        routed_scaling_factor=routed_scaling_factor,
        hidden_size=hidden,
        bias=w2_bias,
        topk_ids=None if w2_bias is None else topk_ids,
        expert_start=expert_start if w2_bias is not None else 0,
        out=out,
    )


def fused_moe(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    *,
    recipe: str = "fp8_block",
    num_experts: int | None = None,
    expert_start: int = 0,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    gemm1_alpha: float | None = 1.702,
    gemm1_clamp_limit: float | None = 7.0,
    beta: float | None = None,
    linear_beta: float | None = None,
    gate_up_interleave: int = 0,
    round_activation: bool = False,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    apply_router_weight_on_input: bool = False,
    layout: str = "auto",
) -> torch.Tensor:
    """Run a whole Mixture-of-Experts layer.

    Row t of the result is the sum over i of `topk_weights[t, i] * expert(hidden_states[t])` for
    the expert `topk_ids[t, i]`.

    Args:
        hidden_states: (tokens, hidden) bfloat16, any strides.
        topk_weights: (tokens, top_k) float32, bfloat16 or float16.
        topk_ids: (tokens, top_k) int32 or int64 global expert ids. -1, ids >= num_experts and other
            ranks' experts are not routed here; a repeated id counts with the sum of its weights.
        w13: (experts, 2 * intermediate, hidden) gate rows, then up rows; contiguous. For mxfp4 int8
            of half the columns, two e2m1 codes a byte, the low nibble first. From
            `prepare_weights`, hidden and intermediate may be padded.
        w13_scale: None for bf16; for fp8_block (experts, 2 * intermediate / 128, hidden / 128)
            float32 (rounded up), or packed UE8M0 int32 (experts, 2 * intermediate, hidden / 512);
            for mxfp8 and mxfp4 packed UE8M0 int32 (experts, 2 * intermediate, hidden / 128).
        w2, w2_scale: (experts, hidden, intermediate), as w13 and w13_scale.
        recipe: "bf16", "fp8_block", "mxfp8" or "mxfp4"; `dgmoe_ops.platforms` says what runs where.
            On SM90 the last bits of mxfp8 and mxfp4 may change where an expert's expected rows
            cross 14 or 72 and another kernel multiplies.
        num_experts: experts over all ranks. Default expert_start + experts.
        expert_start: global id of this rank's first expert.
        activation: "silu", "swigluoai" or "situ"; `dgmoe_ops.activations` has their formulas.
        swiglu_limit: of "silu": clamp gate from above and up from both sides first; None does not.
        gemm1_alpha, gemm1_clamp_limit: of "swigluoai", gpt-oss's by default; a limit of None does
            not clamp.
        beta, linear_beta: of "situ", both required. A parameter of another activation must be None
            or its default.
        gate_up_interleave: the order of the rows of w13 (and w13_bias): 0, all of gate, all of up;
            8, eight of each in turn; 1, one of each in turn. `prepare_weights` pads the two
            halves of 0.
        round_activation: round the activation to bfloat16 before it is quantised, as some peers do.
        w13_bias: (experts, rows of w13) float32 or bfloat16, added to GEMM1 in fp32.
        w2_bias: (experts, hidden) float32 or bfloat16, added to each row of GEMM2 in fp32.
        routed_scaling_factor: multiplies the sum, in fp32; 0, or a normal number of float32.
        apply_router_weight_on_input: multiply what an expert reads instead of what it gives, as
            Llama 4 does: the sum is then over `expert(topk_weights[t, i] * hidden_states[t])`, each
            product rounded to bfloat16. With top_k above 1 every slot has an input row of its own,
            so that the layer runs like one of tokens * top_k tokens; a repeated id then counts once
            a slot.
        layout: "masked", "contig", or "auto": chosen from static facts, the same under graph
            capture as before; `dgmoe_ops.layouts.explain_layout` tells why. SM120 runs contig only.

    Returns:
        (tokens, hidden) bfloat16. A token without a local expert is exactly 0.

    Raises:
        ValueError: an argument has the wrong dtype, rank, size, strides, device or value, or the
            device does not run it; nothing has run then.
        RuntimeError: a tensor requires grad while grad mode is on: the layer is for inference.
    """
    return torch.ops.dgmoe.fused_moe(
        hidden_states,
        topk_weights,
        topk_ids,
        w13,
        w13_scale,
        w2,
        w2_scale,
        recipe=recipe,
        num_experts=num_experts,
        expert_start=expert_start,
        activation=activation,
        swiglu_limit=swiglu_limit,
        gemm1_alpha=gemm1_alpha,
        gemm1_clamp_limit=gemm1_clamp_limit,
        beta=beta,
        linear_beta=linear_beta,
        gate_up_interleave=gate_up_interleave,
        round_activation=round_activation,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        routed_scaling_factor=routed_scaling_factor,
        apply_router_weight_on_input=apply_router_weight_on_input,
        layout=layout,
    )


def _fused_moe_out(*args, **kwargs):
    fused_moe_inline(*args, **kwargs)


_ARGUMENTS = (
    "Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor w13, Tensor? w13_scale,"
    ' Tensor w2, Tensor? w2_scale, *, str recipe="fp8_block", int? num_experts=None,'
    ' int expert_start=0, str activation="silu", float? swiglu_limit=None,'
    " float? gemm1_alpha=1.702, float? gemm1_clamp_limit=7.0, float? beta=None,"
    " float? linear_beta=None, int gate_up_interleave=0, bool round_activation=False,"
    " Tensor? w13_bias=None, Tensor? w2_bias=None, float routed_scaling_factor=1.0,"
    ' bool apply_router_weight_on_input=False, str layout="auto"'
)
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define(f"fused_moe({_ARGUMENTS}) -> Tensor")
_LIBRARY.define(f"fused_moe.out({_ARGUMENTS}, Tensor(a!) out) -> ()")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("fused_moe", fused_moe_inline, _key)
    _LIBRARY.impl("fused_moe.out", _fused_moe_out, _key)

_DEFAULTS = {
    argument.name: argument.default_value
    for argument in torch.ops.dgmoe.fused_moe.default._schema.arguments
    if argument.has_default_value()
}


def _contract(
    devices: dict[str, torch.device], out: torch.Tensor | None = None, **given: object
) -> None:
    """The checks of a call whose tensors stand for others, on `devices`."""
    given = _DEFAULTS | given
    between = {name: given.pop(name) for name in Between._fields if name != "bias"}
    between["bias"] = given.pop("w13_bias")
    given.pop("apply_router_weight_on_input")  # either value is legal in every call
    check_stand_ins_of_layer(Arguments(between=Between(**between), **given), out, devices)


@fake_of("fused_moe", _contract)
def _fused_moe_fake(hidden_states, *args, **kwargs):
    return hidden_states.new_empty(tuple(hidden_states.shape))


@fake_of("fused_moe.out", _contract)
def _fused_moe_out_fake(*args, **kwargs):
    return None
