"""The whole layer: against float64, between layouts, opaque against inline, on bad input."""

import pytest
import torch
from helpers import same_bits

import dgmoe_ops
from dgmoe_ops.formats.layouts import ScaleLayout
from dgmoe_ops.formats.recipes import RECIPES
from dgmoe_ops.reference.layer import fused_moe_quantized_ref, fused_moe_ref
from dgmoe_ops.testing.layer import layer_inputs, relative_error

# Against a float64 layer that never rounds. Rounding a Gaussian to e4m3 in groups costs 2.4 %; gate
# and up carry it once each and their product once more: 2.4 % * sqrt(3) = 4.1 % are the format's,
# whoever computes. On dequantised tokens 4 % holds. Scales that are powers of two cost 2.7 %.
BOUND = {"fp8_block": 5e-2, "mxfp8": 5.5e-2, "mxfp4": 5.5e-2, "bf16": 1e-2}
BOUND_GIVEN_TOKENS = 4e-2
# Against a float64 layer with the roundings that the recipe promises and no others. Hopper's FP8
# tensor cores keep about 13 bits of a partial sum: some GEMM1 results round to the other bf16
# neighbour, and from there some activations to the other e4m3 neighbour.
BOUND_QUANTIZED = {"cpu": 5e-3, "cuda": 3e-2}


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("experts", [1, 8, 32, 257])
def test_against_float64(recipe, experts, top_k, device):
    small = 32 if experts > 100 else 128  # the reference widens every expert to float64
    for tokens in (0, 1, 2, 17, 128, 1000):
        args, kwargs = layer_inputs(tokens, experts, top_k, recipe, device, 128, small)
        want = fused_moe_ref(*args, **kwargs)
        rounded = fused_moe_quantized_ref(*args, **kwargs)
        by_layout = {}
        for layout in ("masked", "contig", "auto"):
            got = torch.ops.dgmoe.fused_moe(*args, layout=layout, **kwargs)
            assert got.shape == args[0].shape and got.dtype == torch.bfloat16
            if recipe == "bf16" or tokens >= 128:  # few tokens scatter up to 6.5 %
                assert relative_error(got, want) < BOUND[recipe], (tokens, layout)
            assert relative_error(got, rounded) < BOUND_QUANTIZED[device.type], (
                tokens,
                layout,
            )
            nowhere = ((args[2] < 0) | (args[2] >= experts)).all(1)
            assert (got[nowhere] == 0).all()
            by_layout[layout] = got
        if device.type == "cuda" and RECIPES[recipe].mx and tokens * top_k > 8 * experts:
            # Few rows and many have kernels that sum differently, and what a call knows of its rows
            # depends on the layout.
            apart = relative_error(by_layout["masked"], by_layout["contig"].double())
            assert apart < BOUND_QUANTIZED["cuda"], tokens
            assert any(torch.equal(by_layout["auto"], by_layout[x]) for x in ("masked", "contig"))
            continue
        assert torch.equal(by_layout["masked"], by_layout["contig"]), tokens
        assert torch.equal(by_layout["auto"], by_layout["masked"]), tokens


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 17, 1000])
def test_error_of_given_tokens(tokens, recipe, device):
    """Against the float64 layer on dequantised tokens and weights: the second rounding is left."""
    (x, *rest), kwargs = layer_inputs(tokens, 8, 2, recipe, device)
    group = RECIPES[recipe].group_size
    q, scale = dgmoe_ops.ops.quant_group_fp8(x, group)
    if RECIPES[recipe].mx:
        q, packed = dgmoe_ops.ops.quant_group_fp8(x, group, ScaleLayout.PACKED_UE8M0)
        scale = dgmoe_ops.ops.unpack_ue8m0(packed, x.shape[1] // group)
    dequantized = q.float() * scale.repeat_interleave(group, 1)
    got = torch.ops.dgmoe.fused_moe(x, *rest, **kwargs)
    want = fused_moe_ref(dequantized, *rest, **kwargs)
    assert relative_error(got, want) < BOUND_GIVEN_TOKENS


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("hidden,inter", [(576, 128), (192, 192), (200, 72)])
def test_sizes_that_are_no_multiple_of_128(recipe, hidden, inter, device):
    args, kwargs = layer_inputs(33, 5, 3, recipe, device, hidden, inter)
    want = fused_moe_ref(*args, **kwargs)
    masked, contig = (
        torch.ops.dgmoe.fused_moe(*args, layout=layout, **kwargs) for layout in ("masked", "contig")
    )
    assert masked.shape == (33, hidden)
    assert torch.equal(masked, contig)
    assert relative_error(masked, want) < BOUND[recipe]


def test_packed_scales(device):
    if device.type == "cuda":
        pytest.skip("packed UE8M0 scales run on SM100 and SM120 only")
    for hidden, inter in ((256, 128), (576, 192)):
        args, kwargs = layer_inputs(40, 6, 2, "fp8_block", device, hidden, inter, target="sm100")
        assert args[4].dtype == torch.int32
        want = fused_moe_ref(*args, **kwargs)
        masked, contig = (
            torch.ops.dgmoe.fused_moe(*args, layout=layout, **kwargs)
            for layout in ("masked", "contig")
        )
        assert torch.equal(masked, contig)
        assert relative_error(masked, want) < BOUND["fp8_block"]


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_expert_parallel_ranks_sum_to_the_whole(recipe, device):
    """Two ranks of four experts each, global ids: their float sum is the layer with all eight."""
    (x, weights, ids, w13, s13, w2, s2), kwargs = layer_inputs(64, 8, 2, recipe, device)
    whole = torch.ops.dgmoe.fused_moe(x, weights, ids, w13, s13, w2, s2, **kwargs)
    parts = []
    for start in (0, 4):
        mine = slice(start, start + 4)
        scales = [None if s is None else s[mine] for s in (s13, s2)]
        parts.append(
            torch.ops.dgmoe.fused_moe(
                x,
                weights,
                ids,
                w13[mine],
                scales[0],
                w2[mine],
                scales[1],
                expert_start=start,
                **kwargs,
            ).float()
        )
    assert relative_error(parts[0] + parts[1], whole) < 5e-3


@pytest.mark.parametrize("layout", ["masked", "contig", "auto"])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_no_local_expert(recipe, layout, device):
    (x, weights, ids, w13, s13, w2, s2), kwargs = layer_inputs(9, 4, 2, recipe, device)
    out = torch.ops.dgmoe.fused_moe(
        x, weights, torch.full_like(ids, -1), w13, s13, w2, s2, layout=layout, **kwargs
    )
    assert torch.equal(out, torch.zeros_like(x))
    none = [None if t is None else t[:0] for t in (w13, s13, w2, s2)]
    out = torch.ops.dgmoe.fused_moe(x, weights, ids, *none, layout=layout, **kwargs)
    assert torch.equal(out, torch.zeros_like(x))


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_inline_out_and_scaling(recipe, device):
    args, kwargs = layer_inputs(21, 8, 2, recipe, device)
    before = [t.clone() for t in args if t is not None]
    whole = torch.ops.dgmoe.fused_moe(*args, routed_scaling_factor=2.5, **kwargs)
    assert torch.equal(
        dgmoe_ops.fused_moe_inline(*args, routed_scaling_factor=2.5, **kwargs), whole
    )
    assert torch.equal(dgmoe_ops.fused_moe(*args, routed_scaling_factor=2.5, **kwargs), whole)
    out = torch.full_like(args[0], float("nan"))
    result = torch.ops.dgmoe.fused_moe.out(*args, routed_scaling_factor=2.5, out=out, **kwargs)
    assert result is None and torch.equal(out, whole)
    plain = torch.ops.dgmoe.fused_moe(*args, **kwargs)
    assert relative_error(whole, plain.float() * 2.5) < 4e-3
    after = [t for t in args if t is not None]
    for b, a in zip(before, after, strict=True):
        assert same_bits(b, a)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "mxfp4"])
def test_a_token_has_the_same_bits_in_any_layout_and_beside_nan(recipe, device):
    """A poisoned token is NaN and leaves every other token's bits alone."""
    (x, weights, ids, *w), kwargs = layer_inputs(50, 8, 2, recipe, device)
    clean = torch.ops.dgmoe.fused_moe(x, weights, ids, *w, layout="contig", **kwargs)
    poisoned = x.clone()
    routed = int(((ids >= 0) & (ids < 8)).all(1).nonzero()[0])
    poisoned[routed, 3] = float("nan")
    for layout in ("masked", "contig"):
        got = torch.ops.dgmoe.fused_moe(poisoned, weights, ids, *w, layout=layout, **kwargs)
        others = [t for t in range(50) if t != routed]
        assert torch.equal(got[others], clean[others])
        assert got[routed].isnan().all()


def test_strided_inputs_and_id_dtypes(device):
    (x, weights, ids, *w), kwargs = layer_inputs(30, 8, 4, "fp8_block", device)
    want = torch.ops.dgmoe.fused_moe(x, weights, ids, *w, **kwargs)
    wide = torch.cat([x, x], 1)[:, : x.shape[1]]
    turned = ids.t().contiguous().t()
    every_other = torch.stack([weights, weights], -1).reshape(30, 8)[:, ::2]
    got = torch.ops.dgmoe.fused_moe(wide, every_other, turned.long(), *w, **kwargs)
    assert torch.equal(got, want)
    halves = weights.to(torch.bfloat16)
    assert torch.equal(
        torch.ops.dgmoe.fused_moe(x, halves, ids, *w, **kwargs),
        torch.ops.dgmoe.fused_moe(x, halves.float(), ids, *w, **kwargs),
    )


def _elsewhere(tensor):
    return tensor.to("meta" if tensor.device.type == "cpu" else "cpu")


BAD = {
    "hidden_states dtype": (
        lambda a, k: a.__setitem__(0, a[0].float()),
        "hidden_states must be bfloat16",
    ),
    "hidden_states rank": (
        lambda a, k: a.__setitem__(0, a[0][None]),
        "hidden_states must have shape",
    ),
    "ids dtype": (lambda a, k: a.__setitem__(2, a[2].float()), "topk_ids must be int32 or int64"),
    "ids rows": (lambda a, k: a.__setitem__(2, a[2][:-1]), "topk_ids must have 9 rows"),
    "k of weights": (
        lambda a, k: a.__setitem__(1, a[1][:, :1]),
        "topk_weights must have the shape of topk_ids",
    ),
    "weights dtype": (lambda a, k: a.__setitem__(1, a[1].double()), "topk_weights must be"),
    "w13 dtype": (lambda a, k: a.__setitem__(3, a[3].float()), "w13 must be float8_e4m3fn"),
    "w13 rank": (lambda a, k: a.__setitem__(3, a[3][0]), "w13 must have shape"),
    "K of w13": (
        lambda a, k: a.__setitem__(3, a[3][:, :, :128].contiguous()),
        "w13 must have 256 columns",
    ),
    "w13 strides": (
        lambda a, k: a.__setitem__(3, a[3].mT.contiguous().mT),
        "w13 must be contiguous",
    ),
    "experts of w2": (lambda a, k: a.__setitem__(5, a[5][:2]), "w2 must have the 4 experts"),
    "K of w2": (
        lambda a, k: a.__setitem__(5, a[5][:, :, :64].contiguous()),
        "w2 must have 128 columns",
    ),
    "no scale": (lambda a, k: a.__setitem__(4, None), "w13_scale must be given"),
    "scale shape": (lambda a, k: a.__setitem__(4, a[4][:, :1]), "w13_scale must have shape"),
    "scale dtype": (
        lambda a, k: a.__setitem__(6, a[6].double()),
        "w2_scale must be float32 or int32",
    ),
    "recipe": (lambda a, k: k.__setitem__("recipe", "fp9"), "recipe must be one of"),
    "bf16 with scales": (lambda a, k: k.__setitem__("recipe", "bf16"), "w13 must be bfloat16"),
    "activation": (lambda a, k: k.__setitem__("activation", "gelu"), "activation must be one of"),
    "layout": (lambda a, k: k.__setitem__("layout", "dense"), "layout must be one of"),
    "num_experts": (lambda a, k: k.__setitem__("num_experts", 3), "num_experts must be at least"),
    "expert_start": (
        lambda a, k: k.__setitem__("expert_start", -1),
        "expert_start must be at least 0",
    ),
    "device": (lambda a, k: a.__setitem__(2, _elsewhere(a[2])), "topk_ids must be on the device"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_names_the_argument(case, device):
    args, kwargs = layer_inputs(9, 4, 2, "fp8_block", device)
    args = list(args)
    spoil, message = BAD[case]
    spoil(args, kwargs)
    calls = [torch.ops.dgmoe.fused_moe, dgmoe_ops.fused_moe_inline]
    if args[2].device.type == "meta":
        calls = calls[1:]  # a meta tensor among the arguments calls the op's fake
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call(*args, **kwargs)
        assert f"dgmoe::fused_moe: {message}" in str(caught.value)


def test_tensors_that_require_grad_are_refused(device):
    args, kwargs = layer_inputs(9, 4, 2, "bf16", device)
    for i, name in ((0, "hidden_states"), (1, "topk_weights"), (3, "w13"), (5, "w2")):
        wanting = list(args)
        wanting[i] = args[i].clone().requires_grad_()
        for call in (torch.ops.dgmoe.fused_moe, dgmoe_ops.fused_moe_inline):
            with pytest.raises(RuntimeError, match=f"{name} must not require grad.*inference"):
                call(*wanting, **kwargs)
        with torch.no_grad():
            torch.ops.dgmoe.fused_moe(*wanting, **kwargs)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda x: x.new_empty(x.shape, dtype=torch.float32), "out must be bfloat16"),
        (lambda x: x.new_empty(8, x.shape[1]), "out must have the shape of hidden_states"),
        (lambda x: x.new_empty(x.shape[1], 9).t(), "out must be contiguous"),
        (lambda x: x.new_empty(x.numel() + 1)[1:].view(x.shape), "out must start on 16 bytes"),
    ],
)
def test_bad_out_is_refused(make, message, device):
    args, kwargs = layer_inputs(9, 4, 2, "bf16", device)
    with pytest.raises(ValueError, match=message):
        torch.ops.dgmoe.fused_moe.out(*args, out=make(args[0]), **kwargs)


def test_sanity_mode_names_the_first_bad_id(device, monkeypatch):
    args, kwargs = layer_inputs(5, 4, 2, "bf16", device)
    x, weights, ids, *rest = args
    ids = ids.clone()
    ids[1, 1], ids[2, 0] = -1, 4  # not routed, both legal
    want = torch.ops.dgmoe.fused_moe(x, weights, ids, *rest, **kwargs)
    bad = ids.clone()
    bad[3, 1] = 9
    torch.ops.dgmoe.fused_moe(x, weights, bad, *rest, **kwargs)  # off by default
    monkeypatch.setenv("DGMOE_SANITY_CHECK", "1")
    assert torch.equal(torch.ops.dgmoe.fused_moe(x, weights, ids, *rest, **kwargs), want)
    for value in (9, -2):
        bad[3, 1] = value
        with pytest.raises(ValueError, match=rf"topk_ids must hold -1 .*, got {value} at \[3, 1\]"):
            torch.ops.dgmoe.fused_moe(x, weights, bad, *rest, **kwargs)
