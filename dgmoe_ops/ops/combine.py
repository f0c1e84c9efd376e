"""Combine room: weigh the expert outputs of each token, sum them, return them to token order."""

from __future__ import annotations

import torch

from ._registry import fake_of


def post_reorder_deepgemm(
    y: torch.Tensor,
    src2dst: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    routed_scaling_factor: float = 1.0,
    hidden_size: int | None = None,
    bias: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_start: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weigh the expert outputs of each token, sum them in top-k order, scale, and return to token
    order.

    Args:
        y: (rows, columns) or (experts, m, columns) bfloat16, any strides.
        src2dst: (tokens, top_k) int32 or int64, the row of y (a slab counts as experts * m rows),
            or -1.
        topk_weights: (tokens, top_k) float32, bfloat16 or float16.
        routed_scaling_factor: multiplies the sum, in fp32; 0, or a normal number of float32.
        hidden_size: columns of the result, at most those of y. Default all.
        bias: (experts, at least hidden_size) float32 or bfloat16, the bias of the GEMM that made y:
            added to each row in fp32, before its weight. Needs `topk_ids`.
        topk_ids: (tokens, top_k) int32 or int64, whose bias a slot takes; an id that is no local
            expert has none.
        expert_start: the id of the first row of `bias`.
        out: a contiguous buffer to write the result into, on 16 bytes; returned. It shares no
            memory with another argument.

    Returns:
        (tokens, hidden_size) bfloat16: fp32 fused multiply-adds in slot order, one rounding. A
        token without a row is exactly 0.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size.
    """
    kwargs = {
        "routed_scaling_factor": routed_scaling_factor,
        "hidden_size": hidden_size,
        "bias": bias,
        "topk_ids": topk_ids,
        "expert_start": expert_start,
    }
    if out is None:
        return torch.ops.dgmoe.post_reorder_deepgemm(y, src2dst, topk_weights, **kwargs)
    torch.ops.dgmoe.post_reorder_deepgemm.out(y, src2dst, topk_weights, **kwargs, out=out)
    return out


@fake_of("post_reorder_deepgemm")
def _post_reorder_deepgemm_fake(y, src2dst, topk_weights, *, hidden_size=None, **_):
    return y.new_empty((src2dst.shape[0], y.shape[-1] if hidden_size is None else hidden_size))


@fake_of("post_reorder_deepgemm.out")
def _post_reorder_deepgemm_out_fake(y, src2dst, topk_weights, **_):
    return None


def ep_gather(
    y: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    output_index: torch.Tensor,
    *,
    hidden_size: int | None = None,
) -> torch.Tensor:
    """Weigh and sum the rows of contiguous segments that came from a dispatcher, back in arrival
    order.

    Args:
        y: (rows, columns) bfloat16, any strides.
        topk_ids: (tokens, top_k) int32 or int64 local expert ids; a negative id is not here.
        topk_weights: (tokens, top_k) float32, bfloat16 or float16.
        output_index: (tokens, top_k) int32 or int64, the row of y, or -1.
        hidden_size: columns of the result, at most those of y. Default all.

    Returns:
        (tokens, hidden_size) bfloat16, as in `post_reorder_deepgemm` with factor 1. A slot counts
        where neither its id nor its row is negative.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size.
    """
    return torch.ops.dgmoe.ep_gather(
        y, topk_ids, topk_weights, output_index, hidden_size=hidden_size
    )


@fake_of("ep_gather")
def _ep_gather_fake(y, topk_ids, topk_weights, output_index, *, hidden_size=None):
    width = y.shape[-1] if hidden_size is None else hidden_size
    return y.new_empty((topk_ids.shape[0], width))
