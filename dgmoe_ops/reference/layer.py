"""The whole layer in float64 on dequantised weights: the truth, and what its roundings leave."""

from __future__ import annotations

import torch

from ._float import decode_ue8m0, on_cpu
from .gemm import dequantize
from .permute import quant_group_fp8_ref
from .scale import PACKED, ROW_MAJOR


def _name(recipe: object) -> str:
    return str(getattr(recipe, "name", recipe))


def dequantized_weight(
    weight: torch.Tensor, scale: torch.Tensor | None, recipe: object
) -> torch.Tensor:
    """Return float64 weights (experts, n, k) of a recipe: bf16, fp8_block, mxfp8 or mxfp4.

    Scales are fp32 (128 x 128 blocks, or one a row and group), UE8M0 bytes, or packed UE8M0 words.
    """
    if scale is None:
        return weight.double()
    gran_k = 32 if _name(recipe).startswith("mx") else 128
    if scale.dtype not in (torch.float32, torch.int32):
        scale = decode_ue8m0(scale.view(torch.uint8))
    if weight.dtype == torch.uint8:
        weight = weight.view(torch.int8)
    gran_mn = 1 if scale.shape[-2] == weight.shape[-2] else 128
    return dequantize(weight, scale, gran_mn, gran_k)


def _run(
    hidden_states,
    topk_weights,
    topk_ids,
    w13,
    w2,
    expert_start,
    on_input,
    first,
    gated,
    last,
    w2_bias,
) -> torch.Tensor:
    """Return the weighted sum over local experts of last(gated(first(x) @ w13^T) @ w2^T).

    With `on_input` the weight of a slot multiplies x instead, rounded to the dtype of x.
    """
    if on_input:
        rest = (w13, w2, expert_start, False, first, gated, last, w2_bias)
        out = torch.zeros(hidden_states.shape, dtype=torch.float64)
        for slot in range(topk_ids.shape[1]):
            weight = topk_weights[:, slot : slot + 1]
            x = (hidden_states.float() * weight.float()).to(hidden_states.dtype)
            out += _run(x, torch.ones_like(weight), topk_ids[:, slot : slot + 1], *rest)
        return out
    tokens, hidden = hidden_states.shape
    inter = w2.shape[2]
    x = first(hidden_states)
    out = torch.zeros((tokens, hidden), dtype=torch.float64)
    for expert in range(w13.shape[0]):
        chosen = topk_ids == expert + expert_start
        here = chosen.any(-1)
        weight = (topk_weights.double() * chosen).sum(-1)[here]
        between = gated(x[here] @ w13[expert, :, :hidden].T, expert)
        y = last(between @ w2[expert, :hidden, :inter].T)
        if w2_bias is not None:
            y = y + w2_bias[expert, :hidden].double()
        out[here] += weight.unsqueeze(-1) * y
    return out


def _halves(columns: torch.Tensor, gate_up_interleave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up of columns that stand in two halves, or in turns of so many."""
    if gate_up_interleave == 0:
        return columns.chunk(2, dim=-1)
    turn = torch.arange(columns.shape[-1]) // gate_up_interleave % 2
    return columns[..., turn == 0], columns[..., turn == 1]


def _activate(name: str, g: torch.Tensor, u: torch.Tensor, given: dict) -> torch.Tensor:
    """Return the activation in the precision of g and u."""
    if name == "situ":
        beta, linear = given["beta"], given["linear_beta"]
        return beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear * torch.tanh(u / linear)
    limit = given["swiglu_limit"]
    alpha, more = 1.0, 0.0
    if name == "swigluoai":
        alpha, limit, more = given["gemm1_alpha"], given["gemm1_clamp_limit"], 1.0
    elif name != "silu":
        raise ValueError(f"fused_moe_ref: activation must be known, got {name!r}")
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + more)


@on_cpu
def fused_moe_ref(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    *,
    recipe: object = "fp8_block",
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
    layout: object = None,
) -> torch.Tensor:
    """Return the layer's output (tokens, hidden) in float64.

    Ids outside the local experts [expert_start, expert_start + w13.shape[0]) contribute nothing; a
    duplicate id counts twice. `num_experts` and `layout` do not change the result. Quantising
    activations twice to e4m3 puts the layer 4 to 5 % away from this, in relative Frobenius norm.
    """
    given = {
        "swiglu_limit": swiglu_limit,
        "gemm1_alpha": gemm1_alpha,
        "gemm1_clamp_limit": gemm1_clamp_limit,
        "beta": beta,
        "linear_beta": linear_beta,
    }

    def gated(gate_up, expert):
        if w13_bias is not None:
            gate_up = gate_up + w13_bias[expert].double()
        return _activate(activation, *_halves(gate_up, gate_up_interleave), given)

    return routed_scaling_factor * _run(
        hidden_states,
        topk_weights,
        topk_ids,
        dequantized_weight(w13, w13_scale, recipe),
        dequantized_weight(w2, w2_scale, recipe),
        expert_start,
        apply_router_weight_on_input,
        torch.Tensor.double,
        gated,
        lambda y: y,
        w2_bias,
    )


@on_cpu
def fused_moe_quantized_ref(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    *,
    recipe: object = "fp8_block",
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
    layout: object = None,
) -> torch.Tensor:
    """Return the layer's output in float64 with every rounding that its stages promise.

    Activations are quantised as the recipe says, GEMM outputs rounded to bf16. A layer is within
    about 0.3 % of this, in relative Frobenius norm.
    """
    given = {
        "swiglu_limit": swiglu_limit,
        "gemm1_alpha": gemm1_alpha,
        "gemm1_clamp_limit": gemm1_clamp_limit,
        "beta": beta,
        "linear_beta": linear_beta,
    }
    group = 32 if _name(recipe) == "mxfp8" else 128
    form = PACKED if w13_scale is not None and w13_scale.dtype == torch.int32 else ROW_MAJOR

    def first(x):
        if w13_scale is None:
            return x.double()
        return dequantize(*quant_group_fp8_ref(x, group, form), 1, group)

    def gated(gate_up, expert):
        rounded = gate_up.bfloat16().double()
        if w13_bias is not None:
            rounded = rounded + w13_bias[expert].double()
        product = _activate(activation, *_halves(rounded, gate_up_interleave), given)
        if w13_scale is None:
            return product.bfloat16().double()
        if round_activation:
            product = product.bfloat16()
        return dequantize(*quant_group_fp8_ref(product.float(), group, form), 1, group)

    return routed_scaling_factor * _run(
        hidden_states,
        topk_weights,
        topk_ids,
        dequantized_weight(w13, w13_scale, recipe),
        dequantized_weight(w2, w2_scale, recipe),
        expert_start,
        apply_router_weight_on_input,
        first,
        gated,
        lambda y: y.bfloat16().double(),
        w2_bias,
    )
