"""Route room: the experts of each token and their weights, from router logits."""

from __future__ import annotations

from enum import IntEnum

import torch

from ._registry import fake_of


class Scoring(IntEnum):
    """What a router's logit becomes before it is a weight."""

    SOFTMAX = 0
    SIGMOID = 1
    SQRT_SOFTPLUS = 2  # sqrt(log(1 + e^x))
    IDENTITY = 3


def topk_gate(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: int = Scoring.SOFTMAX,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_scores: int = 0,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    scale_on_output: bool = False,
    num_tokens: torch.Tensor | None = None,
    num_fused_shared: int = 0,
    expert_map: torch.Tensor | None = None,
    num_counts: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose the best `top_k` experts of each token and weigh them by their scores.

    Experts are chosen by score + bias; without a bias by the logit itself, of which every score is
    a rising function, so that no two scores tie by rounding. NaN ranks first, as in `torch.topk`;
    ties go to the lower id. A row of ids therefore never repeats one.

    Args:
        logits: (tokens, experts) float32, bfloat16 or float16, any strides; 1 to 65536 experts.
        top_k: experts a token, at most those within reach of the groups.
        scoring: a `dgmoe_ops.routing.Scoring`, computed in float32.
        bias: (experts,) float32; takes part in the choice, never in the weights.
        num_groups, topk_groups: experts come from the `topk_groups` best of `num_groups` equal
            groups; experts of the others are never chosen.
        group_scores: what a group counts: 1, its best score (DeepSeek-V2); 2, the sum of its best
            two (DeepSeek-V3); 0 takes 2 where there is a bias and 1 where there is none.
        renormalize: divide the weights of a token by their sum + 1e-20.
        routed_scaling_factor: positive, as float32 too; by what the routed part is scaled, here or
            downstream.
        scale_on_output: multiply the weights by the factor here.
        num_tokens: int32 or int64 tensor of one integer, on the device: rows from it on are padding
            and get ids -1 and weights 0. None: all rows are tokens.
        num_fused_shared: shared experts that are appended to each row: ids `experts + j`, weight
            `1 / routed_scaling_factor`, or 1 with `scale_on_output`.
        expert_map: (experts + num_fused_shared,) or (.., replicas) int32, physical ids. The entries
            of a row before its first negative one are the replicas of that expert, and token t
            takes number `t % replicas`; an expert without any gets id -1 and keeps its weight.
        num_counts: how many ids to count the load of; 0 counts nothing.

    Returns:
        weights (tokens, top_k + num_fused_shared) float32; ids, the same shape, int32, in falling
        order of the choice; counts (num_counts,) int32, how many slots name id e.

    Raises:
        ValueError: an argument has the wrong dtype, shape or value.

    Source: DeepSeek-V2 technical report, section 2.2.2 (groups); DeepSeek-V3 technical report,
    section 2.1.2 (bias, sigmoid).
    """
    return torch.ops.dgmoe.topk_gate(
        logits,
        top_k,
        scoring=scoring,
        bias=bias,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_scores=group_scores,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        scale_on_output=scale_on_output,
        num_tokens=num_tokens,
        num_fused_shared=num_fused_shared,
        expert_map=expert_map,
        num_counts=num_counts,
    )


def _outputs(logits, width, num_counts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], width)
    weights = logits.new_empty(shape, dtype=torch.float32)
    ids = logits.new_empty(shape, dtype=torch.int32)
    return weights, ids, logits.new_empty((num_counts,), dtype=torch.int32)


@fake_of("topk_gate")
def _topk_gate_fake(logits, top_k, *, num_fused_shared=0, num_counts=0, **_):
    return _outputs(logits, top_k + num_fused_shared, num_counts)


def hash_gate(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    logits: torch.Tensor,
    *,
    scoring: int = Scoring.SQRT_SOFTPLUS,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    scale_on_output: bool = False,
    num_tokens: torch.Tensor | None = None,
    num_fused_shared: int = 0,
    expert_map: torch.Tensor | None = None,
    num_counts: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take each token's experts from a table by token id, and weigh them by their logits.

    Args:
        token_ids: (tokens,) int32 or int64, any stride: rows of the table.
        table: (vocabulary, top_k) int32 or int64 expert ids, any strides.
        logits: (tokens, experts) float32, bfloat16 or float16, any strides.
        scoring, renormalize, routed_scaling_factor, scale_on_output, num_tokens, num_fused_shared,
            expert_map, num_counts: as in `topk_gate`.

    Returns:
        weights, ids and counts as `topk_gate` does; columns stand in the order of the table.

    Raises:
        ValueError: an argument has the wrong dtype, shape or value; also where a token id is not in
            the table, or an expert id of its row not in the logits. On CUDA the last is looked at
            with `DGMOE_SANITY_CHECK=1` only; otherwise such slots get id -1 and weight 0.

    Source: DeepSeek-V4 technical report, section 2.1 (hash routing).
    """
    return torch.ops.dgmoe.hash_gate(
        token_ids,
        table,
        logits,
        scoring=scoring,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        scale_on_output=scale_on_output,
        num_tokens=num_tokens,
        num_fused_shared=num_fused_shared,
        expert_map=expert_map,
        num_counts=num_counts,
    )


@fake_of("hash_gate")
def _hash_gate_fake(token_ids, table, logits, *, num_fused_shared=0, num_counts=0, **_):
    return _outputs(logits, table.shape[1] + num_fused_shared, num_counts)
