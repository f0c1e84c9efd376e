"""Row counts of the experts under a routing: even, random, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from .memory import Call


def even_ids(call: Call) -> torch.Tensor:
    """Ids that spread the (token, slot) pairs round robin over all experts."""
    slots = torch.arange(call.tokens * call.top_k) % max(1, call.experts)
    return slots.reshape(call.tokens, call.top_k)


def random_ids(call: Call, seed: int) -> torch.Tensor:
    """Ids of `top_k` distinct experts a token, some experts wanted more than others, as routers
    do."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(call.tokens, call.experts, generator=generator)
    liking = 0.5 * torch.randn(call.experts, generator=generator)
    return (logits + liking).topk(call.top_k).indices


def read_ids(path: Path) -> torch.Tensor:
    """Read (tokens, top_k) ids from a JSON list of lists.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        ids = torch.tensor(json.loads(path.read_text()))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is no JSON list of lists of expert ids: {error}") from error
    if ids.dim() != 2 or ids.dtype != torch.int64:
        shape = tuple(ids.shape)
        raise ValueError(f"{path} must hold a list of lists of expert ids, got shape {shape}")
    return ids


def row_counts(ids: torch.Tensor, local_experts: int) -> list[int]:
    """Rows of each local expert (the first of all): the tokens that name it, each once."""
    named = torch.zeros(ids.shape[0], local_experts, dtype=torch.bool)
    local = (ids >= 0) & (ids < local_experts)
    token, _ = local.nonzero(as_tuple=True)
    named[token, ids[local]] = True
    return named.sum(0).tolist()
