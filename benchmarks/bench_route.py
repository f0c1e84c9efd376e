"""Route room: experts and weights from router logits."""

from __future__ import annotations

import torch

from benchmarks.cases import Builder, Case, nbytes
from benchmarks.inputs import generator
from benchmarks.shapes import Shape
from dgmoe_ops.layer.routing import Scoring

VOCABULARY = 4096


def _logits(shape: Shape, tokens: int, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(tokens, shape.experts, device=device, generator=generator(device, seed))


def topk_gate(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    """DeepSeek-V3's grouped choice where the shape is its, otherwise softmax."""
    logits = _logits(shape, tokens, device, seed)
    kwargs: dict = {}
    if shape.name == "deepseek-v3":
        bias = torch.randn(shape.experts, device=device, generator=generator(device, seed + 1)) / 8
        kwargs = {"scoring": Scoring.SIGMOID, "bias": bias, "num_groups": 8, "topk_groups": 4}
    call = lambda: torch.ops.dgmoe.topk_gate(logits, shape.top_k, **kwargs)  # noqa: E731
    return Case(call, nbytes(logits, kwargs.get("bias")) + tokens * shape.top_k * 8)


def hash_gate(shape: Shape, tokens: int, device: torch.device, seed: int) -> Case:
    rng = generator(device, seed)
    logits = _logits(shape, tokens, device, seed)
    token_ids = torch.randint(VOCABULARY, (tokens,), device=device, generator=rng)
    size = (VOCABULARY, shape.top_k)
    table = torch.randint(shape.experts, size, device=device, generator=rng)
    call = lambda: torch.ops.dgmoe.hash_gate(token_ids, table, logits)  # noqa: E731
    # Of a row of logits only the chosen are needed.
    return Case(call, nbytes(token_ids) + tokens * shape.top_k * (4 + 8 + 8))


OPS: dict[str, Builder] = {"topk_gate": topk_gate, "hash_gate": hash_gate}
