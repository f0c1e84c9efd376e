"""Every row of the table of routings against the model's own block, with the numbers of the row.

Both calls of a row: the block, which applies the factor to the sum, and the gate, which applies it
to the weights that the layer takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import dgmoe_ops
from dgmoe_ops.layer.routing import ROUTINGS, Routing, Scoring
from dgmoe_ops.ops import hash_gate, topk_gate
from dgmoe_ops.testing.layer import relative_error

TOKENS, HIDDEN, INTER, EXPERTS, VOCABULARY = 37, 128, 96, 32, 50
BOUND = 8e-3  # bf16 outputs of both GEMMs and of the activation


@dataclass
class Model:
    """A model's block in transformers, and what the layer takes besides."""

    folder: str
    cls: str
    config: str
    sizes: dict
    arguments: tuple = ()  #: of the block, after the config
    layer: dict = field(default_factory=dict)


def models_of(routing: Routing) -> list[Model]:
    """The models of a row, with its numbers."""
    top_k = {"num_experts_per_tok": routing.top_k}
    norm = {"norm_topk_prob": routing.renormalize}
    plain = top_k | norm | {"intermediate_size": INTER, "num_local_experts": EXPERTS}
    qwen = top_k | norm | {"moe_intermediate_size": INTER, "num_experts": EXPERTS}
    olmoe = top_k | norm | {"intermediate_size": INTER, "num_experts": EXPERTS}
    ernie = {"moe_intermediate_size": INTER, "moe_num_experts": EXPERTS, "moe_k": routing.top_k}
    deepseek = {
        **top_k,
        **norm,
        "moe_intermediate_size": INTER,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "n_group": routing.num_groups,
        "topk_group": routing.topk_groups,
        "routed_scaling_factor": routing.routed_scaling_factor,
    }
    v2 = deepseek | {"topk_method": "greedy" if routing.num_groups == 1 else "group_limited_greedy"}
    v3 = Model("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", deepseek)
    layers = {"num_hidden_layers": 2, "mlp_layer_types": ["hash_moe", "moe"]}
    v4 = Model(
        "deepseek_v4",
        "DeepseekV4SparseMoeBlock",
        "DeepseekV4Config",
        deepseek | layers | {"scoring_func": "sqrtsoftplus", "vocab_size": VOCABULARY},
        (0 if routing.hashed else 1,),
        {"swiglu_limit": 10.0},
    )
    glm = Model("glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig", deepseek)
    oai = {"activation": "swigluoai"}
    return {
        "Qwen3-MoE": [Model("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", qwen)],
        "gpt-oss": [Model("gpt_oss", "GptOssMLP", "GptOssConfig", plain, layer=oai)],
        "Mixtral": [Model("mixtral", "MixtralSparseMoeBlock", "MixtralConfig", plain)],
        "OLMoE": [Model("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig", olmoe)],
        "DeepSeek-V2-Lite": [Model("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config", v2)],
        "DeepSeek-V2": [Model("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config", v2)],
        "ERNIE-4.5-21B-A3B": [
            Model("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeConfig", ernie)
        ],
        "DeepSeek-V3, V3.2 and R1": [
            v3,
            Model("deepseek_v32", "DeepseekV32MoE", "DeepseekV32Config", deepseek),
        ],
        "Kimi-K2": [v3],  # DeepSeek-V3's architecture
        "GLM-4.5": [glm],
        "MiniMax-M2, GLM-4.5-Air": [
            Model("minimax_m2", "MiniMaxM2SparseMoeBlock", "MiniMaxM2Config", plain),
            glm,
        ],
        "Llama 4": [Model("llama4", "Llama4TextMoe", "Llama4TextConfig", plain)],
        "DeepSeek-V4-Flash": [v4],
        "DeepSeek-V4-Flash, its first layers": [v4],
    }[routing.models]


CASES = [(routing, model) for routing in ROUTINGS for model in models_of(routing)]


def module_of(model: Model) -> torch.nn.Module:
    """The model's block in double, with weights that bf16 holds."""
    transformers = pytest.importorskip("transformers")
    code = pytest.importorskip(f"transformers.models.{model.folder}.modeling_{model.folder}")
    config = getattr(transformers, model.config)(hidden_size=HIDDEN, **model.sizes)
    config._experts_implementation = "eager"
    module = getattr(code, model.cls)(config, *model.arguments)
    module = module.double().eval().requires_grad_(False)
    g = torch.Generator().manual_seed(0)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point():
            # Biases of experts and router, and the router itself, near the size of trained ones.
            size = 0.1 if "bias" in name or tensor.dim() < 3 else tensor.shape[-1] ** -0.5
            tensor.data.copy_((torch.randn(tensor.shape, generator=g) * size).bfloat16())
        else:  # the experts of each token id
            rows = [torch.randperm(EXPERTS, generator=g)[: tensor.shape[1]] for _ in tensor]
            tensor.copy_(torch.stack(rows))
    return module


def prepared(w13, w2, device, **more):
    target = "cpu" if device.type == "cpu" else "sm90"
    w13, w2 = (w.bfloat16().contiguous().to(device) for w in (w13, w2))
    return dgmoe_ops.prepare_weights(w13, None, w2, None, recipe="bf16", target=target, **more)


def bias_of(module) -> torch.Tensor | None:
    """The bias that takes part in the choice, wherever the block keeps it."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            return tensor.flatten().float()
    return None


@dataclass
class Parts:
    """What the ops take of a block, on the device."""

    gate_weight: torch.Tensor
    gate_bias: torch.Tensor | None
    weights: dgmoe_ops.MoEWeights
    shared: dgmoe_ops.MoEWeights | None


def parts_of(module, device) -> Parts:
    router = module.router if hasattr(module, "router") else module.gate
    experts = module.experts
    w13, w2 = experts.gate_up_proj, experts.down_proj
    if w13.shape[1] == HIDDEN:  # stored the other way round
        w13, w2 = w13.mT, w2.mT
    more = {}
    if hasattr(experts, "gate_up_proj_bias"):  # gpt-oss
        more = {
            "gate_up_interleave": 1,
            "w13_bias": experts.gate_up_proj_bias.float().to(device),
            "w2_bias": experts.down_proj_bias.float().to(device),
        }
    beside = getattr(module, "shared_experts", getattr(module, "shared_expert", None))
    shared = None
    if beside is not None:
        s13 = torch.cat((beside.gate_proj.weight, beside.up_proj.weight))[None]
        shared = prepared(s13, beside.down_proj.weight[None], device)
    gate_bias = getattr(router, "bias", None)
    return Parts(
        router.weight.bfloat16().to(device),
        None if gate_bias is None else gate_bias.float().to(device),
        prepared(w13, w2, device, **more),
        shared,
    )


@pytest.mark.parametrize(
    ("routing", "model"), CASES, ids=[f"{r.models}: {m.cls}" for r, m in CASES]
)
def test_both_calls_do_what_the_model_does(routing, model, device) -> None:
    module = module_of(model)
    parts = parts_of(module, device)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=g).bfloat16()
    token_ids = torch.randint(VOCABULARY, (TOKENS,), generator=g)
    more = {"input_ids": token_ids[None]} if routing.hashed else {}
    want = module(x.double()[None], **more)
    want = (want[0] if isinstance(want, tuple) else want).view(TOKENS, HIDDEN)
    x, bias = x.to(device), bias_of(module)
    assert (bias is not None) == routing.biased

    def moe_block(*args, **kwargs):
        given = {"gate_bias": parts.gate_bias, "shared": parts.shared}
        return dgmoe_ops.moe_block(*args, **given, **model.layer, **kwargs)

    names = {
        "x": x,
        "gate_weight": parts.gate_weight,
        "weights": parts.weights,
        "logits": dgmoe_ops.router_logits(x, parts.gate_weight, parts.gate_bias),
        "bias": None if bias is None else bias.to(device),
        "token_ids": token_ids.to(device),
        "table": module.gate.tid2eid.to(device) if routing.hashed else None,
        "Scoring": Scoring,
        "moe_block": moe_block,
        "topk_gate": topk_gate,
        "hash_gate": hash_gate,
    }
    block = eval(routing.block, names)  # noqa: S307  (a constant of the package)
    assert relative_error(block.cpu(), want) < BOUND

    topk_weights, topk_ids, _ = eval(routing.call, names)  # noqa: S307
    out = dgmoe_ops.fused_moe(
        x,
        topk_weights,
        topk_ids,
        *parts.weights.tensors,
        recipe="bf16",
        apply_router_weight_on_input=routing.weight_on_input,
        **model.layer,
        **parts.weights.biases,
    )
    if parts.shared is not None:
        every = torch.zeros((TOKENS, 1), dtype=torch.int32, device=device)
        ones = torch.ones((TOKENS, 1), device=device)
        tensors = parts.shared.tensors
        out = out + dgmoe_ops.fused_moe(x, ones, every, *tensors, recipe="bf16", **model.layer)
    assert relative_error(out.cpu(), want) < BOUND

    if routing.routed_scaling_factor != 1.0:  # a factor that is lost, or applied twice, shows
        factor = f"routed_scaling_factor={routing.routed_scaling_factor}"
        for other in (1.0, routing.routed_scaling_factor**2):
            text = routing.block.replace(factor, f"routed_scaling_factor={other}")
            wrong = eval(text, names)  # noqa: S307
            assert relative_error(wrong.cpu(), want) > 0.05
