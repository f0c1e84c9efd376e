"""Inputs for the whole layer, and the error it is measured by."""

from __future__ import annotations

import torch

from ..weights.prepare import prepare_weights

HIDDEN, INTER = 256, 128


def routing(tokens, experts, top_k, generator, dtype=torch.int32):
    """Ids with -1, ids past the last expert and duplicates among them; one expert gets no token."""
    ids = torch.randint(0, max(1, experts - 1), (tokens, top_k), generator=generator)
    kind = torch.randint(0, 12, (tokens, top_k), generator=generator)
    ids[kind == 0] = -1
    ids[kind == 1] = experts
    ids[kind == 2] = experts + 12345
    if top_k > 1 and tokens:
        ids[::3, 1] = ids[::3, 0]
    weights = torch.rand(tokens, top_k, generator=generator)
    return ids.to(dtype), weights


def layer_inputs(tokens, experts, top_k, recipe, device, hidden=HIDDEN, inter=INTER, target="cpu"):
    """Positional and keyword arguments of `fused_moe`, the weights prepared from random bf16
    ones."""
    g = torch.Generator().manual_seed(tokens * 1000003 + experts * 101 + top_k)
    x = torch.randn(tokens, hidden, generator=g).to(torch.bfloat16)
    ids, weights = routing(tokens, experts, top_k, g)
    w13 = torch.randn(experts, 2 * inter, hidden, generator=g, dtype=torch.bfloat16) * hidden**-0.5
    w2 = torch.randn(experts, hidden, inter, generator=g, dtype=torch.bfloat16) * inter**-0.5
    x, ids, weights, w13, w2 = (t.to(device) for t in (x, ids, weights, w13, w2))
    prepared = prepare_weights(w13, None, w2, None, recipe, target)
    return (x, weights, ids, *prepared.tensors), {"recipe": recipe, "num_experts": experts}


def relative_error(got, want) -> float:
    """||got - want|| / ||want||, in float64; NaN where anything is NaN."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
