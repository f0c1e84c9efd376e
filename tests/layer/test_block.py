"""The whole block: gate, routing, layer, shared experts, against plain torch and models' own."""

from __future__ import annotations

import pytest
import torch
from helpers import same_bits

import dgmoe_ops
from dgmoe_ops.formats.recipes import RECIPES
from dgmoe_ops.layer.routing import Scoring
from dgmoe_ops.testing.layer import relative_error

TOKENS, HIDDEN, INTER, EXPERTS, TOP_K = 37, 128, 64, 8, 2
BOUND = 8e-3  # bf16 outputs of both GEMMs and of the activation


def normal(*shape, seed=0, size=1.0):
    """Normal numbers that bf16 holds."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * size).bfloat16()


def prepared(w13, w2, device, recipe="bf16"):
    target = "cpu" if device.type == "cpu" else "sm90"
    w13, w2 = w13.bfloat16().to(device), w2.bfloat16().to(device)
    return dgmoe_ops.prepare_weights(w13, None, w2, None, recipe=recipe, target=target)


def weights_of(device, experts=EXPERTS, inter=INTER, seed=0, recipe="bf16"):
    w13 = normal(experts, 2 * inter, HIDDEN, seed=seed, size=HIDDEN**-0.5)
    w2 = normal(experts, HIDDEN, inter, seed=seed + 1, size=inter**-0.5)
    return w13, w2, prepared(w13, w2, device, recipe)


def expert(x, w13, w2):
    gate, up = (x @ w13.double().T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.double().T


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_gate", [False, True])
def test_against_plain_torch(device, gate_dtype, with_gate) -> None:
    x, gate = normal(TOKENS, HIDDEN, seed=9), normal(EXPERTS, HIDDEN, seed=10, size=0.1)
    w13, w2, weights = weights_of(device)
    s13, s2, shared = weights_of(device, 2, 128, seed=20)
    shared_gate = normal(1, HIDDEN, seed=30, size=0.1) if with_gate else None
    wide = x.double()
    scores, ids = (wide @ gate.double().T).softmax(-1).topk(TOP_K)
    scores = scores / scores.sum(-1, keepdim=True)
    want = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for weight, e in zip(scores[token], ids[token].tolist(), strict=True):
            want[token] += 2.5 * weight * expert(wide[token], w13[e], w2[e])
    extra = sum(expert(wide, s13[j], s2[j]) for j in range(2))
    want += extra * torch.sigmoid(wide @ shared_gate.double().T) if with_gate else extra
    got = dgmoe_ops.moe_block(
        x.to(device),
        gate.to(gate_dtype).to(device),
        weights,
        top_k=TOP_K,
        routed_scaling_factor=2.5,
        shared=shared,
        shared_gate=shared_gate.to(device) if with_gate else None,
    )
    assert got.dtype == torch.bfloat16 and relative_error(got.cpu(), want) < BOUND


def test_sizes_that_the_gate_gemm_does_not_take(device) -> None:
    x, gate = normal(3, 72, seed=1).to(device), normal(5, 72, seed=2).to(device)
    bias = normal(5, seed=3).to(device)
    logits = dgmoe_ops.router_logits(x, gate, bias)
    want = x.double() @ gate.double().T + bias.double()
    assert logits.dtype == torch.float32 and relative_error(logits, want) < 1e-6


def test_padding_rows_and_no_tokens(device) -> None:
    x, gate = normal(TOKENS, HIDDEN).to(device), normal(EXPERTS, HIDDEN, seed=1).to(device)
    _, _, weights = weights_of(device)
    whole = dgmoe_ops.moe_block(x, gate, weights, top_k=TOP_K)
    count = torch.tensor([20], device=device)
    part = dgmoe_ops.moe_block(x, gate, weights, top_k=TOP_K, num_tokens=count)
    assert torch.equal(part[:20], whole[:20]) and not part[20:].any()
    assert dgmoe_ops.moe_block(x[:0], gate, weights, top_k=TOP_K).shape == (0, HIDDEN)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_recipe(recipe, device) -> None:
    """The block is its parts, shared experts of the same recipe among them."""
    x = normal(TOKENS, HIDDEN).to(device)
    gate = normal(EXPERTS, HIDDEN, seed=1, size=0.1).to(device)
    _, _, weights = weights_of(device, recipe=recipe)
    _, _, shared = weights_of(device, 2, 128, seed=20, recipe=recipe)
    got = dgmoe_ops.moe_block(x, gate, weights, top_k=TOP_K, shared=shared)
    chosen, where, _ = dgmoe_ops.ops.topk_gate(dgmoe_ops.router_logits(x, gate), TOP_K, scoring=0)
    routed = dgmoe_ops.fused_moe(x, chosen, where, *weights.tensors, recipe=recipe)
    ones = torch.ones(TOKENS, 2, device=device)
    ids = torch.arange(2, device=device).expand(TOKENS, 2)
    every = dgmoe_ops.fused_moe(x, ones, ids, *shared.tensors, recipe=recipe)
    assert torch.equal(got, routed + every)


def test_hash_routing(device) -> None:
    x, gate = (
        normal(TOKENS, HIDDEN).to(device),
        normal(EXPERTS, HIDDEN, seed=1, size=0.1).to(device),
    )
    _, _, weights = weights_of(device)
    g = torch.Generator().manual_seed(3)
    table = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(50)])
    table, ids = table.to(device), torch.randint(0, 50, (TOKENS,), generator=g).to(device)
    given = {"scoring": Scoring.SQRT_SOFTPLUS, "token_ids": ids, "hash_table": table}
    got = dgmoe_ops.moe_block(x, gate, weights, top_k=TOP_K, **given)
    logits = dgmoe_ops.router_logits(x, gate)
    chosen, where, _ = dgmoe_ops.ops.hash_gate(ids, table, logits, scoring=Scoring.SQRT_SOFTPLUS)
    want = dgmoe_ops.fused_moe(x, chosen, where, *weights.tensors, recipe="bf16")
    assert torch.equal(got, want)
    for missing in ("token_ids", "hash_table"):
        with pytest.raises(ValueError, match="hash_table must be given together with token_ids"):
            dgmoe_ops.moe_block(x, gate, weights, top_k=TOP_K, **{missing: given[missing]})
    with pytest.raises(ValueError, match="hash_table must have 3 columns, top_k"):
        dgmoe_ops.moe_block(x, gate, weights, top_k=3, **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("experts", [60, 64])
def test_autocast_changes_no_choice(experts, gate_dtype, compiled, dtype, device) -> None:
    """The router stays in fp32; bf16 logits would choose other experts for many of these tokens."""
    x = normal(500, HIDDEN, seed=1).to(device)
    gate, shared_gate = normal(experts, HIDDEN, seed=2), normal(1, HIDDEN, seed=3)
    gate = (gate.float() * 1.001 if gate_dtype == torch.float32 else gate).to(device)
    bias, shared_gate = normal(experts, seed=4).to(device), shared_gate.float().to(device)
    _, _, weights = weights_of(device, experts, 16)
    _, _, shared = weights_of(device, 1, 16, seed=7)
    exact = (x.double() @ gate.double().T + bias.double()).cpu()
    rough = (x.bfloat16() @ gate.bfloat16().T + bias.bfloat16()).cpu()
    assert (exact.topk(4).indices.sort().values != rough.topk(4).indices.sort().values).any(1).any()

    def logits(x):
        return dgmoe_ops.router_logits(x, gate, bias)

    def block(x):
        given = {"gate_bias": bias, "shared": shared, "shared_gate": shared_gate}
        return dgmoe_ops.moe_block(x, gate, weights, top_k=4, **given)

    want, out = logits(x), block(x)
    assert want.dtype == torch.float32 and relative_error(want.cpu(), exact) < 1e-6
    if compiled:
        torch._dynamo.reset()
        logits, block = (
            torch.compile(f, backend="aot_eager", fullgraph=True) for f in (logits, block)
        )
    with torch.autocast(device.type, dtype=dtype):
        got = logits(x)
        assert got.dtype == torch.float32 and torch.equal(got, want)
        assert torch.equal(block(x), out)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_autocast_changes_no_padded_layer(recipe, device) -> None:
    """Preparing under autocast, too."""
    x, gate = normal(9, 72, seed=1).to(device), normal(EXPERTS, 72, seed=2).to(device)
    w13 = normal(EXPERTS, 2 * 24, 72, seed=3, size=72**-0.5)
    w2 = normal(EXPERTS, 72, 24, seed=4, size=24**-0.5)
    weights = prepared(w13, w2, device, recipe)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        same = prepared(w13, w2, device, recipe)
    for one, other in zip(weights.tensors, same.tensors, strict=True):
        assert one is None and other is None or same_bits(one, other)
    for layout in ("masked", "contig"):
        want = dgmoe_ops.moe_block(x, gate, weights, top_k=TOP_K, layout=layout)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            got = dgmoe_ops.moe_block(x, gate, weights, top_k=TOP_K, layout=layout)
        assert torch.equal(got, want)


def test_every_tensor_is_checked(device) -> None:
    """Nothing broadcasts: each argument is refused by name for its dtype, shape and device."""
    x, gate = normal(3, HIDDEN).to(device), normal(EXPERTS, HIDDEN, seed=1).to(device)
    _, _, weights = weights_of(device)
    _, _, shared = weights_of(device, 1, seed=7)
    ids, table = torch.arange(3, device=device), torch.zeros(9, 2, dtype=torch.int64, device=device)
    good = {
        "hidden_states": x,
        "gate_weight": gate,
        "gate_bias": gate[:, 0],
        "bias": gate[:, 0].float(),
        "num_tokens": torch.tensor(3, device=device),
        "expert_map": torch.arange(EXPERTS, dtype=torch.int32, device=device),
        "shared_gate": gate[:1],
    }
    hashed = {name: good[name] for name in ("hidden_states", "gate_weight")}
    hashed |= {"token_ids": ids, "hash_table": table}
    rest = {"weights": weights, "top_k": 2, "shared": shared}
    dgmoe_ops.moe_block(**good, **rest)
    dgmoe_ops.moe_block(**hashed, **rest)
    bad = {
        "hidden_states": [x[0], x[None], x.float(), None],
        "gate_weight": [gate[:, :64], gate[0], gate.half(), None],
        "gate_bias": [good["gate_bias"][:1], good["gate_bias"][None], gate[:, 0].int()],
        "bias": [good["bias"][:1], good["bias"][:, None], gate[:, 0]],
        "num_tokens": [torch.tensor([1, 2], device=device), torch.tensor(3.0, device=device)],
        "expert_map": [good["expert_map"][:7], good["expert_map"].long(), good["expert_map"][0]],
        "shared_gate": [gate, gate[0], gate[:1, :64], gate[:1].half()],
        "token_ids": [ids[:2], ids[None], ids.float()],
        "hash_table": [table[:, :1], table[0], table.float()],
    }
    for name, tensors in bad.items():
        given = good if name in good else hashed
        if name != "hidden_states":
            tensors.append(given[name].to("meta" if device.type == "cpu" else "cpu"))
        for tensor in tensors:
            with pytest.raises(ValueError, match=f"dgmoe_ops.moe_block: {name} must "):
                dgmoe_ops.moe_block(**(given | {name: tensor}), **rest)
    for name in ("hidden_states", "gate_weight", "gate_bias"):
        three = {key: good[key] for key in ("hidden_states", "gate_weight", "gate_bias")}
        with pytest.raises(ValueError, match=f"dgmoe_ops.router_logits: {name} must "):
            dgmoe_ops.router_logits(**(three | {name: three[name].int()}))
    for extra in ({"bias": good["bias"]}, {"num_groups": 2}, {"group_scores": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(extra))} must be .* with hash_table"):
            dgmoe_ops.moe_block(**hashed, **rest, **extra)
    narrow = dgmoe_ops.prepare_weights(
        normal(2, 32, 64).to(device), None, normal(2, 64, 16).to(device), None, recipe="bf16"
    )
    for name in ("weights", "shared"):
        with pytest.raises(ValueError, match=f"{name} must have the hidden size .*, 128, got 64"):
            dgmoe_ops.moe_block(**good, **(rest | {name: narrow}))
        with pytest.raises(ValueError, match=f"{name} must be MoEWeights"):
            dgmoe_ops.moe_block(**good, **(rest | {name: gate}))


def test_bad_input_is_named(device) -> None:
    x, gate = normal(3, HIDDEN).to(device), normal(EXPERTS, HIDDEN, seed=1).to(device)
    _, _, weights = weights_of(device)
    for arg, call in {
        "gate_weight": lambda: dgmoe_ops.moe_block(x, gate[:, :64], weights, top_k=2),
        "gate_weight must be bf": lambda: dgmoe_ops.moe_block(x, gate.half(), weights, top_k=2),
        "shared_gate": lambda: dgmoe_ops.moe_block(x, gate, weights, top_k=2, shared_gate=gate),
        "top_k": lambda: dgmoe_ops.moe_block(x, gate, weights, top_k=EXPERTS + 1),
        "linear_beta": lambda: dgmoe_ops.moe_block(
            x, gate, weights, top_k=2, activation="situ", beta=1.0
        ),
    }.items():
        with pytest.raises(ValueError, match=arg.split(" must")[0]):
            call()


def test_compiles_and_captures(device) -> None:
    x, gate = normal(TOKENS, HIDDEN).to(device), normal(EXPERTS, HIDDEN, seed=1).to(device)
    _, _, weights = weights_of(device)
    _, _, shared = weights_of(device, 1, 64, seed=7)

    def block(x, gate):
        return dgmoe_ops.moe_block(x, gate, weights, top_k=TOP_K, shared=shared)

    want = block(x, gate)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, gate), want)
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = block(x, gate)
        x.copy_(normal(TOKENS, HIDDEN, seed=5))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, block(x, gate))


# ---- models' own blocks ----


def module_of(name: str, cls: str, config_name: str, **sizes):
    transformers = pytest.importorskip("transformers")
    models = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    config = getattr(transformers, config_name)(hidden_size=HIDDEN, **sizes)
    config._experts_implementation = "eager"
    module = getattr(models, cls)(config).double().eval().requires_grad_(False)
    for i, (key, tensor) in enumerate([*module.named_parameters(), *module.named_buffers()]):
        if tensor.is_floating_point():
            size = 0.1 if "bias" in key or tensor.dim() < 3 else tensor.shape[-1] ** -0.5
            tensor.data.copy_(normal(*tensor.shape, seed=i, size=size))
    return module


def output_of(module, x) -> torch.Tensor:
    with torch.no_grad():
        y = module(x.double()[None])
    return (y[0] if isinstance(y, tuple) else y)[0]


def test_qwen3_moe(device) -> None:
    module = module_of(
        "qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", moe_intermediate_size=INTER,
        num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=True,
    )  # fmt: skip
    x, experts = normal(TOKENS, HIDDEN, seed=3), module.experts
    weights = prepared(experts.gate_up_proj, experts.down_proj, device)
    gate = module.gate.weight.bfloat16().to(device)
    got = dgmoe_ops.moe_block(x.to(device), gate, weights, top_k=TOP_K)
    assert relative_error(got.cpu(), output_of(module, x)) < BOUND


def test_deepseek_v3(device) -> None:
    module = module_of(
        "deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", moe_intermediate_size=INTER,
        n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, n_shared_experts=2,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    x, experts, beside = normal(TOKENS, HIDDEN, seed=3), module.experts, module.shared_experts
    weights = prepared(experts.gate_up_proj, experts.down_proj, device)
    s13 = torch.cat((beside.gate_proj.weight, beside.up_proj.weight))[None]
    shared = prepared(s13, beside.down_proj.weight[None], device)
    got = dgmoe_ops.moe_block(
        x.to(device),
        module.gate.weight.bfloat16().to(device),
        weights,
        top_k=4,
        scoring=Scoring.SIGMOID,
        bias=module.gate.e_score_correction_bias.float().to(device),
        num_groups=4,
        topk_groups=2,
        routed_scaling_factor=2.5,
        shared=shared,
    )
    assert relative_error(got.cpu(), output_of(module, x)) < BOUND


@pytest.mark.parametrize("limit", [7.0, None])
def test_gpt_oss(limit, device) -> None:
    """Interleaved gate and up, biases everywhere, its own activation, with its clamp or without."""
    module = module_of(
        "gpt_oss", "GptOssMLP", "GptOssConfig", intermediate_size=INTER,
        num_local_experts=EXPERTS, num_experts_per_tok=TOP_K,
    )  # fmt: skip
    x, experts, router = normal(TOKENS, HIDDEN, seed=3) * 9, module.experts, module.router
    clamped = output_of(module, x)
    experts.limit = float("inf") if limit is None else limit
    want = output_of(module, x)
    assert relative_error(clamped, want) > 0.1 or limit is not None
    w13 = experts.gate_up_proj.transpose(1, 2).contiguous()
    w2 = experts.down_proj.transpose(1, 2).contiguous()
    got = dgmoe_ops.moe_block(
        x.to(device),
        router.weight.bfloat16().to(device),
        prepared(w13, w2, device),
        top_k=TOP_K,
        gate_bias=router.bias.to(device),
        activation="swigluoai",
        gemm1_clamp_limit=limit,
        gate_up_interleave=1,
        w13_bias=experts.gate_up_proj_bias.float().to(device),
        w2_bias=experts.down_proj_bias.float().to(device),
    )
    assert relative_error(got.cpu(), want) < BOUND
