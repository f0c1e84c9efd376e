"""Row counts of the experts under a routing: even, random, or read from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from .memory import Call

_MOST_VALUES = 1 << 24  # of a tensor made at a time


def even_counts(call: Call) -> list[int]:
    """Rows of each local expert where the (token, slot) pairs go round robin over all experts."""
    each, more = divmod(call.tokens * call.top_k, call.experts)
    return [each + (expert < more) for expert in range(call.local_experts)]


def random_ids(call: Call, seed: int) -> Iterator[torch.Tensor]:
    """Ids of `top_k` distinct experts a token, some experts wanted more than others, as routers
    do; some tokens at a time."""
    tokens = range(0, call.tokens, max(1, _MOST_VALUES // call.experts))

    def logits(generator: torch.Generator) -> Iterator[torch.Tensor]:
        for first in tokens:
            count = min(tokens.step, call.tokens - first)
            yield torch.randn(count, call.experts, generator=generator)

    ahead = torch.Generator().manual_seed(seed)
    for _ in logits(ahead):
        pass  # what all experts have in common is drawn behind the tokens
    liking = 0.5 * torch.randn(call.experts, generator=ahead)
    for some in logits(torch.Generator().manual_seed(seed)):
        yield (some + liking).topk(call.top_k).indices


def random_counts(call: Call, seed: int) -> list[int]:
    """Rows of each local expert under `random_ids`."""
    total = torch.zeros(call.local_experts, dtype=torch.int64)
    for ids in random_ids(call, seed):
        total += torch.tensor(row_counts(ids, call.local_experts))
    return total.tolist()


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
    total = torch.zeros(local_experts, dtype=torch.int64)
    for some in ids.split(max(1, _MOST_VALUES // max(1, local_experts))):
        named = torch.zeros(some.shape[0], local_experts, dtype=torch.bool)
        local = (some >= 0) & (some < local_experts)
        token, _ = local.nonzero(as_tuple=True)
        named[token, some[local]] = True
        total += named.sum(0)
    return total.tolist()
