"""A whole MoE block: the router's gate, routing, the layer, and shared experts beside it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ..ops.gemm import gemm_nt_bf16bf16f32
from ..ops.route import hash_gate, topk_gate
from ..weights.prepare import MoEWeights
from .block_checks import BlockCheck
from .fused_moe import fused_moe
from .routing import Scoring

_GATE_COLUMNS, _GATE_ROWS = 64, 8  # what the GEMM of the gate takes multiples of on a GPU


def _without_autocast(device: torch.device) -> AbstractContextManager:
    """A region in which matrix products keep the dtypes of their operands."""
    # Not torch.amp.is_autocast_available, which Dynamo does not trace before PyTorch 2.13.
    if device.type not in ("cpu", "cuda"):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _logits(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, gate_bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute what `router_logits` does, of checked arguments."""
    experts, hidden = gate_weight.shape
    fits = hidden % _GATE_COLUMNS == 0 and experts % _GATE_ROWS == 0
    if gate_weight.dtype == torch.bfloat16 and fits:
        logits = gemm_nt_bf16bf16f32(hidden_states.contiguous(), gate_weight.contiguous())
    else:
        # Logits in bf16 would choose other experts.
        with _without_autocast(hidden_states.device):
            logits = hidden_states.float() @ gate_weight.float().t()
    return logits if gate_bias is None else logits + gate_bias.float()


def router_logits(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, gate_bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the router's logits in fp32, under autocast too.

    Args:
        hidden_states: (tokens, hidden) bfloat16.
        gate_weight: (experts, hidden); bfloat16 goes through one GEMM with fp32 sums, float32
            multiplies the widened tokens.
        gate_bias: (experts,) of a floating dtype, the bias of the router's linear layer, added in
            fp32.

    Returns:
        (tokens, experts) float32.

    Raises:
        ValueError: an argument has the wrong dtype, shape or device.
    """
    BlockCheck("router_logits").router(hidden_states, gate_weight, gate_bias)
    return _logits(hidden_states, gate_weight, gate_bias)


def _shared_output(
    hidden_states: torch.Tensor, shared: MoEWeights, gate: torch.Tensor | None, activation: dict
) -> torch.Tensor:
    """Every token through every shared expert, with weight 1 or the sigmoid of its own gate."""
    tokens, experts = hidden_states.shape[0], shared.w13.shape[0]
    ids = torch.arange(experts, dtype=torch.int32, device=hidden_states.device)
    ids = ids.expand(tokens, experts)
    if gate is None:
        weights = torch.ones((tokens, experts), device=hidden_states.device)
    else:
        weights = torch.sigmoid(_logits(hidden_states, gate)).expand(tokens, experts)
    return fused_moe(
        hidden_states,
        weights,
        ids,
        *shared.tensors,
        recipe=shared.recipe,
        **shared.biases,
        **activation,
    )


def moe_block(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    weights: MoEWeights,
    *,
    top_k: int,
    gate_bias: torch.Tensor | None = None,
    scoring: int = Scoring.SOFTMAX,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_scores: int = 0,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    apply_router_weight_on_input: bool = False,
    num_tokens: torch.Tensor | None = None,
    num_fused_shared: int = 0,
    expert_map: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    hash_table: torch.Tensor | None = None,
    shared: MoEWeights | None = None,
    shared_gate: torch.Tensor | None = None,
    num_experts: int | None = None,
    expert_start: int = 0,
    layout: str = "auto",
    **activation: object,
) -> torch.Tensor:
    """Run a whole MoE block: gate, routing, layer, and shared experts added to the routed ones.

    Args:
        hidden_states: (tokens, hidden) bfloat16.
        gate_weight: (experts, hidden) bfloat16 or float32, the router over all ranks' experts.
        weights: the routed experts of this rank, from `prepare_weights` or `load_moe_layer`; their
            biases are added.
        top_k: experts a token.
        gate_bias: (experts,), the bias of the router's linear layer (gpt-oss).
        scoring, bias, num_groups, topk_groups, group_scores, renormalize: as in
            `dgmoe_ops.ops.topk_gate`; `dgmoe_ops.routing` says which model takes which.
        routed_scaling_factor: multiplies the sum of the routed experts, in fp32; positive.
        apply_router_weight_on_input: multiply what the routed experts read by their weights instead
            of what they give (Llama 4), as in `fused_moe`. Shared experts are weighed as ever.
        num_tokens: int32 or int64 tensor of one integer: rows from it on are padding; their routed
            part is zero.
        num_fused_shared: shared experts that stand behind the routed ones in `weights`.
        expert_map: physical ids of the experts, as in `topk_gate`.
        token_ids, hash_table: given together, experts come from the table's row of each token
            (`dgmoe_ops.ops.hash_gate`) and top_k must be its width; bias and groups have no use
            then and are refused.
        shared: shared experts, which every token goes through; added after the layer.
        shared_gate: (1, hidden) weighs the shared experts of a token by its sigmoid (Qwen2-MoE).
        num_experts, expert_start, layout: as in `fused_moe`. Default of num_experts: the ids that
            routing can give.
        activation: `activation`, its parameters, biases (where `weights` have none) and more of
            `fused_moe`. Shared experts take the same activation, with their own biases.

    Returns:
        (tokens, hidden) bfloat16: the routed sum, plus the shared sum where there is one, each
        rounded once.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value.
    """
    check = BlockCheck("moe_block")
    check.router(hidden_states, gate_weight, gate_bias)
    tokens, hidden = hidden_states.shape
    check.choice(gate_weight.shape[0], num_fused_shared, bias, num_tokens, expert_map)
    unused = {
        "bias": (bias, None),
        "num_groups": (num_groups, 1),
        "topk_groups": (topk_groups, 1),
        "group_scores": (group_scores, 0),
    }
    check.hashing(tokens, top_k, token_ids, hash_table, unused)
    check.weights("weights", weights, hidden)
    check.shared(shared, shared_gate, hidden)
    if apply_router_weight_on_input and num_fused_shared and routed_scaling_factor != 1:
        # Their weight undoes the factor on the way out, which an input cannot.
        must = "be 1 where weights apply to inputs and shared experts are fused"
        check.fail("routed_scaling_factor", must, routed_scaling_factor)
    for name in weights.biases.keys() & activation.keys():
        if activation[name] is not None:
            check.fail(name, "be None where weights bring one", tuple(activation[name].shape))
    logits = _logits(hidden_states, gate_weight, gate_bias)
    scaled = {
        "scoring": scoring,
        "renormalize": renormalize,
        "routed_scaling_factor": routed_scaling_factor,
        "num_tokens": num_tokens,
        "num_fused_shared": num_fused_shared,
        "expert_map": expert_map,
    }
    if hash_table is None:
        topk_weights, topk_ids, _ = topk_gate(
            logits,
            top_k,
            bias=bias,
            num_groups=num_groups,
            topk_groups=topk_groups,
            group_scores=group_scores,
            **scaled,
        )
    else:
        topk_weights, topk_ids, _ = hash_gate(token_ids, hash_table, logits, **scaled)
    if num_experts is None and expert_map is None:
        num_experts = gate_weight.shape[0] + num_fused_shared
    routed = fused_moe(
        hidden_states,
        topk_weights,
        topk_ids,
        *weights.tensors,
        recipe=weights.recipe,
        num_experts=num_experts,
        expert_start=expert_start,
        routed_scaling_factor=routed_scaling_factor,
        apply_router_weight_on_input=apply_router_weight_on_input,
        layout=layout,
        **{**activation, **weights.biases},
    )
    if shared is None:
        return routed
    between = {name: value for name, value in activation.items() if not name.endswith("_bias")}
    return routed + _shared_output(hidden_states, shared, shared_gate, between)
