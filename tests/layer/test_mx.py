"""The layer on MX weights: against its oracle for any shape, and what it says of bad ones."""

import pytest
import torch
from helpers import same_bits
from hypothesis import given
from hypothesis import strategies as st

import dgmoe_ops
from dgmoe_ops import layouts, prepare_weights
from dgmoe_ops.formats.recipes import RECIPES
from dgmoe_ops.layer import fused_moe as layer_module
from dgmoe_ops.layer.fused_moe import resolve_layout
from dgmoe_ops.reference.layer import fused_moe_quantized_ref
from dgmoe_ops.reference.scale import pack_words
from dgmoe_ops.testing.layer import layer_inputs, relative_error, routing

MX = ("mxfp8", "mxfp4")
BOUND = {"cpu": 5e-3, "cuda": 3e-2}


def exponents(experts, n, k, about, seed):
    """Packed scales of 32 columns: a byte that differs from those of its neighbours."""
    e, row, group = (torch.arange(size) for size in (experts, n, -(-k // 32)))
    steps = e.view(-1, 1, 1) * 5 + row.view(-1, 1) * 3 + group * 2 + seed
    return pack_words(about + steps % 7)


def weights(recipe, experts, n, k, about, g, seed):
    """Random codes under scales that no other place has, in the form that the layer reads."""
    if recipe == "mxfp4":
        b = torch.randint(-128, 128, (experts, n, k // 2), generator=g).to(torch.int8)
    else:
        b = torch.randn(experts, n, k, generator=g).to(torch.float8_e4m3fn)
    words = exponents(experts, n, k, about, seed)
    rows = layouts.round_up(n, 4)
    room = torch.zeros(experts, words.shape[2], rows, dtype=torch.int32)[..., :n].mT
    return b, room.copy_(words)


@given(
    recipe=st.sampled_from(MX),
    tokens=st.sampled_from([0, 1, 3, 17, 140]),
    experts=st.integers(0, 4),
    top_k=st.integers(1, 3),
    hidden=st.sampled_from([128, 256, 384]),
    inter=st.sampled_from([128, 256]),
    seed=st.integers(0, 10**6),
)
def test_property_against_the_oracle(recipe, tokens, experts, top_k, hidden, inter, seed, device):
    """Expert experts - 1 has no token; scales differ from block to block."""
    g = torch.Generator().manual_seed(seed)
    about = 115 if recipe == "mxfp4" else 118
    w13, s13 = weights(recipe, experts, 2 * inter, hidden, about, g, seed)
    w2, s2 = weights(recipe, experts, hidden, inter, about, g, seed + 1)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    ids, given_weights = routing(tokens, experts, top_k, g)
    args = tuple(t.to(device) for t in (x, given_weights, ids))
    # A copy closes the gaps between columns only where there are none.
    args += tuple(t.to(device) for t in (w13, s13, w2, s2))
    kwargs = {"recipe": recipe, "num_experts": experts}
    masked, contig = (
        torch.ops.dgmoe.fused_moe(*args, layout=layout, **kwargs) for layout in ("masked", "contig")
    )
    assert torch.equal(masked, contig)
    assert relative_error(masked, fused_moe_quantized_ref(*args, **kwargs)) < BOUND[device.type]


@pytest.mark.parametrize("recipe", MX)
def test_a_shifted_scale_is_seen(recipe, device) -> None:
    """The bound above can fail: one word of scales in another place is past it."""
    args, kwargs = layer_inputs(33, 4, 2, recipe, device)
    want = fused_moe_quantized_ref(*args, **kwargs)
    scale = args[4].clone()
    scale[:, :, 0] = (scale[:, :, 0] & 0x00FFFFFF) + ((scale[:, :, 0] >> 24) + 1 << 24)
    got = torch.ops.dgmoe.fused_moe(*args[:4], scale, *args[5:], **kwargs)
    assert relative_error(got, want) > 10 * BOUND[device.type]


@pytest.mark.parametrize("recipe", MX)
def test_an_unpadded_size_needs_no_padding(recipe, device) -> None:
    """Weights of a hidden size that is no multiple of 128, as somebody else may have made them."""
    if device.type == "cuda":
        pytest.skip("sizes that a GPU takes are its backend's")
    g = torch.Generator().manual_seed(3)
    w13, s13 = weights(recipe, 2, 192, 160, 117, g, 0)
    w2, s2 = weights(recipe, 2, 160, 96, 117, g, 1)
    x = torch.randn(9, 160, generator=g).bfloat16()
    ids, given_weights = routing(9, 3, 2, g)
    args = (x, given_weights, ids, w13, s13, w2, s2)
    got = torch.ops.dgmoe.fused_moe(*args, recipe=recipe)
    assert relative_error(got, fused_moe_quantized_ref(*args, recipe=recipe)) < BOUND["cpu"]


def test_the_choice_of_a_layout_sees_values_not_bytes(monkeypatch) -> None:
    """Packed FP4 halves the columns of the weights, not of the slab."""
    seen = []
    monkeypatch.setattr(layer_module, "choose_layout", seen.append)
    for recipe in MX:
        args, _ = layer_inputs(4, 4, 2, recipe, "cpu", 256, 128)
        resolve_layout("auto", 4, 2, args[3], args[5], RECIPES[recipe])
    assert seen[0] == seen[1]
    assert (seen[0].hidden, seen[0].inter) == (256, 128)


BAD = {
    "fp8 weights": ({3: lambda w: torch.zeros(4, 256, 256).to(torch.float8_e4m3fn)}, "w13 must be"),
    "columns": (
        {3: lambda w: w[..., :96].contiguous()},
        r"w13 must have 128 columns of 2 values \(the hidden size\) or, padded, 128 columns of 2"
        r" values, got \(4, 256, 96\) for hidden_states \(9, 256\)",
    ),
    "hidden_states": (
        {0: lambda x: x[:, :120]},
        r"w13 must have 60 columns of 2 values \(the hidden size\) or, padded, 64",
    ),
    "columns of w2": (
        {5: lambda w: w[..., :32].contiguous()},
        r"w2 must have 64 columns of 2 values, half the rows of w13, got \(4, 256, 32\) for w13"
        r" \(4, 256, 128\)",
    ),
    "fp32 scale": ({4: lambda s: torch.ones(4, 256, 8)}, "w13_scale must be int32, got float32"),
    "no scale": ({6: lambda s: None}, "w2_scale must be given for recipe mxfp4"),
    "scale of another group": (
        {4: lambda s: s[..., :1]},
        r"w13_scale must have shape \(4, 256, 2\) as packed UE8M0 int32 scales of recipe mxfp4, got"
        r" \(4, 256, 1\)",
    ),
    "scale of another half": (
        {4: lambda s: s[:, :128]},
        r"w13_scale must have shape \(4, 256, 2\) as packed .*, got \(4, 128, 2\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_names_the_argument(case, device) -> None:
    args, kwargs = layer_inputs(9, 4, 2, "mxfp4", device)
    changes, says = BAD[case]
    args = list(args)
    for i, change in changes.items():
        changed = change(args[i])
        args[i] = changed if changed is None else changed.to(device)
    args[0] = args[0].contiguous()
    for call in (torch.ops.dgmoe.fused_moe, dgmoe_ops.fused_moe_inline):
        with pytest.raises(ValueError, match=f"dgmoe::fused_moe: {says}"):
            call(*args, **kwargs)


@pytest.mark.parametrize(
    ("made", "asked", "says"),
    [
        ("mxfp8", "mxfp4", "w13 must be int8, got float8_e4m3fn"),
        ("mxfp4", "mxfp8", "w13 must be float8_e4m3fn, got int8"),
        ("mxfp4", "bf16", "w13 must be bfloat16, got int8"),
        (
            "mxfp8",
            "fp8_block",
            r"w13_scale must have shape \(4, 256, 1\) as packed UE8M0 int32 scales of recipe"
            r" fp8_block, got \(4, 256, 2\), as weights prepared for recipe mxfp8 have it",
        ),
        (
            "fp8_block",
            "mxfp8",
            r"w13_scale must have shape \(4, 256, 2\) .*, got \(4, 256, 1\), as weights prepared"
            " for recipe fp8_block have it",
        ),
    ],
)
def test_weights_of_another_recipe_are_named(made, asked, says, device) -> None:
    target = "sm100" if made == "fp8_block" else "cpu"
    args, kwargs = layer_inputs(9, 4, 2, made, device, target=target)
    with pytest.raises(ValueError, match=f"dgmoe::fused_moe: {says}"):
        torch.ops.dgmoe.fused_moe(*args, **kwargs | {"recipe": asked})


@pytest.mark.parametrize("recipe", MX)
def test_weights_of_another_target_are_named(recipe, device) -> None:
    """fp8_block weights for Hopper have fp32 scales; asked for as MX they are named."""
    args, kwargs = layer_inputs(9, 4, 2, "fp8_block", device, target="sm90")
    says = "w13_scale must be int32, got float32" if recipe == "mxfp8" else "w13 must be int8"
    with pytest.raises(ValueError, match=f"dgmoe::fused_moe: {says}"):
        torch.ops.dgmoe.fused_moe(*args, **kwargs | {"recipe": recipe})


@pytest.mark.parametrize("recipe", MX)
@pytest.mark.parametrize("target", ["cpu", "sm90", "sm100"])
def test_every_target_has_the_same_weights(recipe, target) -> None:
    g = torch.Generator().manual_seed(0)
    w13 = torch.randn(2, 144, 200, generator=g)
    w2 = torch.randn(2, 200, 72, generator=g)
    first = prepare_weights(w13, None, w2, None, recipe, "cpu")
    made = prepare_weights(w13, None, w2, None, recipe, target)
    for one, other in zip(first.tensors, made.tensors, strict=True):
        assert same_bits(one, other) and one.stride() == other.stride()
