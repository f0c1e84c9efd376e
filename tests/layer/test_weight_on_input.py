"""Router weights on what the experts read: against the oracle, by hand, and Llama 4's own block."""

from __future__ import annotations

import pytest
import torch
from helpers import strided

import dgmoe_ops
from dgmoe_ops.formats.recipes import RECIPES
from dgmoe_ops.layer.routing import Scoring
from dgmoe_ops.reference.layer import fused_moe_quantized_ref, fused_moe_ref
from dgmoe_ops.testing.layer import layer_inputs, relative_error

ON_INPUT = {"apply_router_weight_on_input": True}
LAYOUTS = ("masked", "contig")
BOUND = {"cpu": 5e-3, "cuda": 3e-2}  # as in test_fused_moe.py


def biases(w13, hidden):
    g = torch.Generator().manual_seed(5)
    w13_bias = torch.randn(w13.shape[:2], generator=g).to(w13.device)
    w2_bias = torch.randn(w13.shape[0], hidden, generator=g).to(w13.device)
    return {"w13_bias": w13_bias, "w2_bias": w2_bias}


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_against_the_oracle(recipe, top_k, tokens, device) -> None:
    """Repeated, unrouted and foreign ids among them, and an expert without tokens."""
    args, kwargs = layer_inputs(tokens, 6, top_k, recipe, device)
    kwargs |= biases(args[3], args[0].shape[1]) | ON_INPUT | {"routed_scaling_factor": 1.5}
    want = fused_moe_quantized_ref(*args, **kwargs)
    for layout in LAYOUTS:
        got = torch.ops.dgmoe.fused_moe(*args, layout=layout, **kwargs)
        assert relative_error(got, want) < BOUND[device.type] or tokens == 0
        inline = dgmoe_ops.fused_moe_inline(*args, layout=layout, **kwargs)
        wrapped = dgmoe_ops.fused_moe(*args, layout=layout, **kwargs)
        assert torch.equal(inline, got) and torch.equal(wrapped, got)
        out = args[0].clone()
        torch.ops.dgmoe.fused_moe.out(out, *args[1:], layout=layout, **kwargs, out=out)
        assert torch.equal(out, got)
    if tokens > 1:  # it is not the same as weights on the results
        outside = fused_moe_ref(*args, **(kwargs | {"apply_router_weight_on_input": False}))
        assert relative_error(want, outside) > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_one_expert_a_token_is_the_layer_on_weighed_tokens(recipe, layout, device) -> None:
    (x, weights, ids, *w), kwargs = layer_inputs(33, 6, 1, recipe, device)
    kwargs["layout"] = layout
    weighed = (x.float() * weights).bfloat16()
    want = torch.ops.dgmoe.fused_moe(weighed, torch.ones_like(weights), ids, *w, **kwargs)
    got = torch.ops.dgmoe.fused_moe(x, weights, ids, *w, **kwargs, **ON_INPUT)
    assert torch.equal(got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_slots_sum(recipe, layout, device) -> None:
    """A token's result is the sum over its slots; a repeated id counts once a slot."""
    (x, weights, ids, *w), kwargs = layer_inputs(12, 6, 3, recipe, device)
    kwargs |= ON_INPUT | {"layout": layout}
    parts = [
        torch.ops.dgmoe.fused_moe(x, weights[:, i : i + 1], ids[:, i : i + 1], *w, **kwargs)
        for i in range(3)
    ]
    want = sum((part.float() for part in parts[1:]), parts[0].float()).bfloat16()
    assert torch.equal(torch.ops.dgmoe.fused_moe(x, weights, ids, *w, **kwargs), want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_the_weight_of_a_slot_that_is_not_routed_reaches_nothing(recipe, layout, device) -> None:
    (x, weights, ids, *w), kwargs = layer_inputs(24, 6, 3, recipe, device)
    kwargs |= ON_INPUT | {"layout": layout}
    want = torch.ops.dgmoe.fused_moe(x, weights, ids, *w, **kwargs)
    nowhere = (ids < 0) | (ids >= 6)
    assert nowhere.any() and not nowhere.all()
    for poison in (float("nan"), float("inf")):
        spoiled = weights.masked_fill(nowhere, poison)
        assert torch.equal(torch.ops.dgmoe.fused_moe(x, spoiled, ids, *w, **kwargs), want)


def test_dtypes_and_strides(device) -> None:
    (x, weights, ids, *w), kwargs = layer_inputs(24, 6, 3, "fp8_block", device)
    kwargs |= ON_INPUT
    for dtype in (torch.bfloat16, torch.float16):
        narrow = weights.to(dtype)
        want = torch.ops.dgmoe.fused_moe(x, narrow.float(), ids, *w, **kwargs)
        views = (strided(x), strided(narrow), strided(ids).long())
        assert torch.equal(torch.ops.dgmoe.fused_moe(*views, *w, **kwargs), want)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        under = torch.ops.dgmoe.fused_moe(x, weights, ids, *w, **kwargs)
    assert torch.equal(under, torch.ops.dgmoe.fused_moe(x, weights, ids, *w, **kwargs))


@pytest.mark.parametrize("call", [torch.ops.dgmoe.fused_moe, dgmoe_ops.fused_moe_inline])
def test_compiles_for_any_number_of_tokens(call, device) -> None:
    torch._dynamo.reset()
    (x, weights, ids, *w), kwargs = layer_inputs(24, 6, 2, "fp8_block", device)
    kwargs |= ON_INPUT | {"layout": "contig"}

    def layer(*tokens):
        return call(*tokens, *w, **kwargs)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (24, 5, 17):
        some = (x[:tokens], weights[:tokens], ids[:tokens])
        assert torch.equal(compiled(*some), layer(*some))


def test_fused_shared_experts(device) -> None:
    """Their weight is 1 with a factor of 1 alone; another factor is refused."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 64, generator=g).bfloat16().to(device)
    gate = torch.randn(4, 64, generator=g).bfloat16().to(device)
    w13 = (torch.randn(5, 64, 64, generator=g) / 8).bfloat16().to(device)
    w2 = (torch.randn(5, 64, 32, generator=g) / 6).bfloat16().to(device)
    whole = dgmoe_ops.prepare_weights(w13, None, w2, None, recipe="bf16")
    routed, shared = (
        dgmoe_ops.prepare_weights(w13[part], None, w2[part], None, recipe="bf16")
        for part in (slice(4), slice(4, 5))
    )
    given = {"top_k": 2, "scoring": Scoring.SIGMOID} | ON_INPUT
    fused = dgmoe_ops.moe_block(x, gate, whole, num_fused_shared=1, **given)
    beside = dgmoe_ops.moe_block(x, gate, routed, shared=shared, **given)
    assert relative_error(fused, beside) < 8e-3
    with pytest.raises(ValueError, match="routed_scaling_factor must be 1 where weights apply"):
        dgmoe_ops.moe_block(x, gate, whole, num_fused_shared=1, routed_scaling_factor=2.0, **given)


@pytest.mark.parametrize("top_k", [1, 2])
def test_llama4(top_k, device) -> None:
    """Its own block: sigmoid weights on the inputs, a shared expert beside."""
    models = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    transformers = pytest.importorskip("transformers")
    config = transformers.Llama4TextConfig(
        hidden_size=128, intermediate_size=64, num_local_experts=8, num_experts_per_tok=top_k
    )
    module = models.Llama4TextMoe(config).double().eval().requires_grad_(False)
    g = torch.Generator().manual_seed(1)
    for tensor in module.parameters():
        size = 0.1 if tensor.dim() < 3 else tensor.shape[1] ** -0.5
        tensor.data.copy_((torch.randn(tensor.shape, generator=g) * size).bfloat16())
    x = torch.randn(37, 128, generator=g).bfloat16()
    want = module(x.double()[None])[0]

    def prepared(w13, w2):
        w13, w2 = (w.bfloat16().contiguous().to(device) for w in (w13, w2))
        target = "cpu" if device.type == "cpu" else "sm90"
        return dgmoe_ops.prepare_weights(w13, None, w2, None, recipe="bf16", target=target)

    experts, beside = module.experts, module.shared_expert
    got = dgmoe_ops.moe_block(
        x.to(device),
        module.router.weight.bfloat16().to(device),
        prepared(experts.gate_up_proj.mT, experts.down_proj.mT),
        top_k=top_k,
        scoring=Scoring.SIGMOID,
        renormalize=False,
        apply_router_weight_on_input=True,
        shared=prepared(
            torch.cat((beside.gate_proj.weight, beside.up_proj.weight))[None],
            beside.down_proj.weight[None],
        ),
    )
    assert relative_error(got.cpu(), want) < 8e-3
