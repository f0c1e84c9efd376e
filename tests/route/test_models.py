"""The routers of models, as transformers computes them, choose what the ops choose."""

from __future__ import annotations

import pytest
import torch

from dgmoe_ops.layer.routing import Scoring
from dgmoe_ops.ops import hash_gate, topk_gate

pytest.importorskip("transformers")

TOKENS, HIDDEN = 65, 128


def config_of(name: str, **sizes):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name, None)
    if config is None:
        pytest.skip(f"this transformers has no {name}")
    return config(hidden_size=HIDDEN, **sizes)


def router_of(module: str, name: str, config) -> torch.nn.Module:
    models = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    torch.manual_seed(0)
    router = getattr(models, name)(config).float().eval()
    for tensor in (*router.parameters(), *router.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_()
            tensor.data.div_(4)
    return router


def assert_same(device, router, call, *inputs) -> None:
    """`call(logits)` gives the router's experts and weights, in any order of the slots."""
    with torch.no_grad():
        logits, weights, ids = router(torch.randn(TOKENS, HIDDEN), *inputs)
        found_weights, found_ids, _ = call(logits.to(device))
    order, found_order = ids.argsort(-1), found_ids.cpu().long().argsort(-1)
    assert torch.equal(ids.gather(1, order), found_ids.cpu().long().gather(1, found_order))
    found = found_weights.cpu().gather(1, found_order)
    torch.testing.assert_close(found, weights.gather(1, order), rtol=3e-6, atol=0)


def test_deepseek_v2(device) -> None:
    config = config_of(
        "DeepseekV2Config", n_routed_experts=32, num_experts_per_tok=6, n_group=8,
        topk_group=3, topk_method="group_limited_greedy", routed_scaling_factor=16.0,
        norm_topk_prob=False,
    )  # fmt: skip
    router = router_of("deepseek_v2", "DeepseekV2TopkRouter", config)
    assert_same(
        device,
        router,
        lambda logits: topk_gate(
            logits, 6, num_groups=8, topk_groups=3, renormalize=False, routed_scaling_factor=16.0,
            scale_on_output=True,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("renormalize", [True, False])
def test_deepseek_v3(device, renormalize: bool) -> None:
    config = config_of(
        "DeepseekV3Config", n_routed_experts=64, num_experts_per_tok=8, n_group=8,
        topk_group=4, routed_scaling_factor=2.5, norm_topk_prob=renormalize,
    )  # fmt: skip
    router = router_of("deepseek_v3", "DeepseekV3TopkRouter", config)
    bias = router.e_score_correction_bias.to(device)
    assert_same(
        device,
        router,
        lambda logits: topk_gate(
            logits, 8, scoring=Scoring.SIGMOID, bias=bias, num_groups=8, topk_groups=4,
            renormalize=renormalize, routed_scaling_factor=2.5, scale_on_output=True,
        ),
    )  # fmt: skip


def v4_config():
    return config_of(
        "DeepseekV4Config", n_routed_experts=64, num_experts_per_tok=6,
        vocab_size=100, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5,
    )  # fmt: skip


def test_deepseek_v4(device) -> None:
    router = router_of("deepseek_v4", "DeepseekV4TopKRouter", v4_config())
    bias = router.e_score_correction_bias.to(device)
    kwargs = {"routed_scaling_factor": 1.5, "scale_on_output": True, "bias": bias}
    assert_same(
        device,
        router,
        lambda logits: topk_gate(logits, router.top_k, scoring=Scoring.SQRT_SOFTPLUS, **kwargs),
    )


def test_deepseek_v4_hash(device) -> None:
    router = router_of("deepseek_v4", "DeepseekV4HashRouter", v4_config())
    rows = [torch.randperm(router.num_experts)[: router.top_k] for _ in range(100)]
    router.tid2eid.copy_(torch.stack(rows))
    token_ids = torch.randint(100, (TOKENS,))
    table = router.tid2eid.to(device)
    assert_same(
        device,
        router,
        lambda logits: hash_gate(
            token_ids.to(device), table, logits, routed_scaling_factor=1.5, scale_on_output=True
        ),
        token_ids,
    )


@pytest.mark.parametrize("renormalize", [True, False])
def test_qwen3_moe(device, renormalize: bool) -> None:
    config = config_of(
        "Qwen3MoeConfig", num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=renormalize,
    )  # fmt: skip
    router = router_of("qwen3_moe", "Qwen3MoeTopKRouter", config)
    assert_same(device, router, lambda logits: topk_gate(logits, 8, renormalize=renormalize))


def test_gpt_oss(device) -> None:
    """Softmax over the chosen logits is softmax over all, divided by the sum of the chosen."""
    config = config_of("GptOssConfig", num_local_experts=32, num_experts_per_tok=4)
    router = router_of("gpt_oss", "GptOssTopKRouter", config)
    assert_same(device, router, lambda logits: topk_gate(logits, 4))


def test_mixtral(device) -> None:
    config = config_of("MixtralConfig", num_local_experts=8, num_experts_per_tok=2)
    router = router_of("mixtral", "MixtralTopKRouter", config)
    assert_same(device, router, lambda logits: topk_gate(logits, 2))
