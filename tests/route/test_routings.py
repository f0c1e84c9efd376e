"""The table of routings: every call in it runs and does what it says."""

from __future__ import annotations

import pytest
import torch

from dgmoe_ops.layer.routing import ROUTINGS, Routing, Scoring
from dgmoe_ops.ops import hash_gate, topk_gate


def test_factors_of_released_models() -> None:
    """From the configs of their checkpoints."""
    factors = {routing.models: routing.routed_scaling_factor for routing in ROUTINGS}
    assert {models: factor for models, factor in factors.items() if factor != 1.0} == {
        "DeepSeek-V2": 16.0,
        "DeepSeek-V3, V3.2 and R1": 2.5,
        "Kimi-K2": 2.827,
        "GLM-4.5": 2.5,
        "DeepSeek-V4-Flash": 1.5,
        "DeepSeek-V4-Flash, its first layers": 1.5,
    }


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.models)
def test_calls_run(device, routing: Routing) -> None:
    torch.manual_seed(0)
    names = {
        "logits": torch.randn(5, 64, device=device),
        "bias": torch.randn(64, device=device),
        "token_ids": torch.randint(9, (5,), device=device),
        "table": torch.randint(64, (9, 6), device=device),
    }
    used: dict = {}

    def spy(function):
        def call(*args, **kwargs):
            used.update(kwargs)
            return function(*args, **kwargs)

        return call

    gates = {"topk_gate": spy(topk_gate), "hash_gate": spy(hash_gate), "Scoring": Scoring}
    weights, ids, _ = eval(routing.call, gates, names)  # noqa: S307  (a constant of the package)
    default = Scoring.SQRT_SOFTPLUS if "hash" in routing.call else Scoring.SOFTMAX
    assert used.get("scoring", default) == routing.scoring
    assert ("bias" in used) == routing.biased
    factor = used.get("routed_scaling_factor", 1.0)
    sums = (weights.sum(-1) / factor).cpu()
    assert torch.allclose(sums, torch.ones(5)) == routing.renormalize
    assert (used.get("num_groups", 1) > 1) == ("group" in routing.groups)
    assert ((ids >= 0) & (ids < 64)).all()
    assert factor == routing.routed_scaling_factor
    assert used.get("scale_on_output", False) == (factor != 1.0)
    assert ids.shape[1] == routing.top_k
