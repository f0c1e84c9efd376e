"""Every activation through the whole layer: each recipe, layout, column order and bias."""

import pytest
import torch

import dgmoe_ops
from dgmoe_ops.formats.recipes import RECIPES
from dgmoe_ops.layer.activations import ACTIVATIONS
from dgmoe_ops.reference.layer import fused_moe_quantized_ref
from dgmoe_ops.testing.layer import layer_inputs, relative_error

CASES = {
    "silu": {"activation": "silu"},
    "silu, limit": {"activation": "silu", "swiglu_limit": 0.5},
    "swigluoai": {"activation": "swigluoai"},
    "swigluoai, own": {"activation": "swigluoai", "gemm1_alpha": 0.7, "gemm1_clamp_limit": 1.5},
    "situ": {"activation": "situ", "beta": 0.5, "linear_beta": 2.0},
}
#: an e4m3 value beside a rounding boundary goes to the other neighbour now and then
BOUND = {
    "cpu": {"bf16": 3e-3, "fp8_block": 5e-3, "mxfp8": 5e-3, "mxfp4": 5e-3},
    "cuda": {"bf16": 3e-3, "fp8_block": 3e-2, "mxfp8": 3e-2, "mxfp4": 3e-2},
}
TOKENS, EXPERTS, TOP_K = 33, 5, 2


def reordered(w13, gate_up_interleave):
    """w13 with its gate and up rows in turns of `gate_up_interleave`."""
    if gate_up_interleave == 0:
        return w13
    gate, up = (half.unflatten(1, (-1, gate_up_interleave)) for half in w13.chunk(2, dim=1))
    return torch.stack((gate, up), dim=2).flatten(1, 3).contiguous()


def biases(w13, hidden, device):
    g = torch.Generator().manual_seed(5)
    return {
        "w13_bias": torch.randn(w13.shape[:2], generator=g).to(device),
        "w2_bias": torch.randn(w13.shape[0], hidden, generator=g).bfloat16().to(device),
    }


def test_the_table_is_covered() -> None:
    assert {case["activation"] for case in CASES.values()} == set(ACTIVATIONS)


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("gate_up_interleave", [0, 8, 1])
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name, recipe, gate_up_interleave, with_bias, device) -> None:
    args, kwargs = layer_inputs(TOKENS, EXPERTS, TOP_K, recipe, device)
    x, weights, ids, w13, w13_scale, w2, w2_scale = args
    if w13_scale is not None:
        # One scale everywhere, so that rows may change places; e2m1 values are smaller.
        exponent = -9 if recipe != "mxfp4" else -4
        packed = w13_scale.dtype == torch.int32
        one = (127 + exponent) * 0x01010101 if packed else 2.0**exponent
        w13_scale = w13_scale.clone().fill_(one)
    w13 = reordered(w13, gate_up_interleave)
    args = (x, weights, ids, w13, w13_scale, w2, w2_scale)
    kwargs |= CASES[name] | {"gate_up_interleave": gate_up_interleave, "routed_scaling_factor": 1.5}
    if with_bias:
        kwargs |= biases(w13, x.shape[1], device)
    masked, contig = (
        torch.ops.dgmoe.fused_moe(*args, layout=layout, **kwargs) for layout in ("masked", "contig")
    )
    assert torch.equal(masked, contig)
    want = fused_moe_quantized_ref(*args, **kwargs)
    assert relative_error(masked, want) < BOUND[device.type][recipe]
    inline = dgmoe_ops.fused_moe_inline(*args, layout="contig", **kwargs)
    assert torch.equal(inline, contig)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_activations_differ(recipe, device) -> None:
    """No parameter is dropped on the way: each case has a result of its own."""
    args, kwargs = layer_inputs(TOKENS, EXPERTS, TOP_K, recipe, device)
    results = [torch.ops.dgmoe.fused_moe(*args, **kwargs, **case) for case in CASES.values()]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert relative_error(one, other) > 2e-2


@pytest.mark.parametrize("layout", ["masked", "contig"])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_limit_of_none_does_not_clamp(recipe, layout, device) -> None:
    """gpt-oss's formula with its clamp at 7 and without, on gates and ups of 20 and more."""
    (x, *rest), kwargs = layer_inputs(TOKENS, EXPERTS, TOP_K, recipe, device)
    args = (x * 20, *rest)
    kwargs |= {"activation": "swigluoai", "layout": layout}
    clamped = torch.ops.dgmoe.fused_moe(*args, **kwargs)
    assert torch.equal(torch.ops.dgmoe.fused_moe(*args, **kwargs, gemm1_clamp_limit=7.0), clamped)
    free = torch.ops.dgmoe.fused_moe(*args, **kwargs, gemm1_clamp_limit=None)
    inline = dgmoe_ops.fused_moe_inline(*args, **kwargs, gemm1_clamp_limit=None)
    wrapped = dgmoe_ops.fused_moe(*args, **kwargs, gemm1_clamp_limit=None)
    assert torch.equal(inline, free) and torch.equal(wrapped, free)
    assert relative_error(clamped, free) > 0.3
    bound = BOUND[device.type][recipe]
    want = fused_moe_quantized_ref(*args, **kwargs)
    assert relative_error(clamped, want) < bound
    want = fused_moe_quantized_ref(*args, **kwargs, gemm1_clamp_limit=None)
    assert relative_error(free, want) < bound
    if recipe == "bf16":  # in plain torch, of documented formulas alone
        _, weights, ids, w13, _, w2, _ = (None if t is None else t.cpu().double() for t in args)
        plain = torch.zeros(x.shape, dtype=torch.float64)
        for token, slot in ((t, k) for t in range(TOKENS) for k in range(TOP_K)):
            expert = int(ids[token, slot])
            if 0 <= expert < EXPERTS:
                gate, up = (w13[expert] @ args[0][token].cpu().double()).chunk(2)
                between = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                plain[token] += weights[token, slot] * (w2[expert] @ between)
        assert relative_error(free.cpu(), plain) < 1e-2


def test_round_activation(device) -> None:
    args, kwargs = layer_inputs(TOKENS, EXPERTS, TOP_K, "fp8_block", device)
    fine = torch.ops.dgmoe.fused_moe(*args, **kwargs)
    coarse = torch.ops.dgmoe.fused_moe(*args, round_activation=True, **kwargs)
    assert not torch.equal(fine, coarse)
    assert relative_error(coarse, fine) < 2e-2


@pytest.mark.parametrize("start", [0, 3])
def test_biases_of_this_rank(start, device) -> None:
    """A rank adds the biases of its own experts, and of no slot that is routed elsewhere."""
    args, kwargs = layer_inputs(TOKENS, 8, TOP_K, "bf16", device)
    x, weights, ids, w13, _, w2, _ = args
    both = biases(w13, x.shape[1], device)
    mine = slice(start, start + 4)
    local = {name: bias[mine] for name, bias in both.items()}
    kwargs |= {"num_experts": 8, "expert_start": start}
    local_args = (x, weights, ids, w13[mine], None, w2[mine], None)
    got = torch.ops.dgmoe.fused_moe(*local_args, **kwargs, **local)
    want = fused_moe_quantized_ref(*local_args, **kwargs, **local)
    assert relative_error(got, want) < BOUND[device.type]["bf16"]
    nobody = torch.full_like(ids, -1)
    out = torch.ops.dgmoe.fused_moe(x, weights, nobody, *local_args[3:], **kwargs, **local)
    assert not out.any()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"activation": "gelu"}, "activation must be one of silu, swigluoai, situ, got 'gelu'"),
        ({"activation": "silu", "beta": 1.0}, "activation 'silu': beta must be None"),
        ({"gemm1_alpha": 1.7}, "activation 'silu': gemm1_alpha must be None"),
        ({"gemm1_clamp_limit": 6.0}, "activation 'silu': gemm1_clamp_limit must be None"),
        ({"activation": "swigluoai", "gemm1_alpha": None}, "gemm1_alpha must be a number"),
        ({"activation": "swigluoai", "swiglu_limit": 7.0}, "swiglu_limit must be None"),
        ({"activation": "situ", "beta": 1.0}, "'situ': linear_beta must be given, got None"),
        (
            {"swiglu_limit": -1.0},
            "swiglu_limit must be positive as float32, at least 1.18e-38, got -1.0",
        ),
        ({"swiglu_limit": float("inf")}, "swiglu_limit must be finite"),
        ({"gate_up_interleave": 4}, "gate_up_interleave must be one of 0, 1, 8, got 4"),
        ({"w13_bias": torch.zeros(5, 3)}, r"w13_bias must have 256 columns, got \(5, 3\)"),
        ({"w13_bias": torch.zeros(4, 256)}, "w13_bias must have a row for each of the 5 local"),
        ({"w2_bias": torch.zeros(5, 256).half()}, "w2_bias must be float32 or bfloat16, got fl"),
        ({"w2_bias": torch.zeros(256)}, r"w2_bias must have shape \(5, 256\), got \(256,\)"),
    ],
)
def test_bad_input_is_named(given, said, device) -> None:
    args, kwargs = layer_inputs(3, 5, 2, "bf16", device)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(ValueError, match=f"dgmoe::fused_moe: .*{said}"):
        torch.ops.dgmoe.fused_moe(*args, **kwargs, **moved)


@pytest.mark.parametrize("name", ["silu, limit", "situ"])
def test_compiles_with_parameters(name, device) -> None:
    args, kwargs = layer_inputs(7, 4, 2, "bf16", device)
    kwargs |= CASES[name] | biases(args[3], args[0].shape[1], device)

    def call(*tensors):
        return dgmoe_ops.fused_moe_inline(*tensors, **kwargs)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*args), call(*args))
