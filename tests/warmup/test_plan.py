"""What a warm-up plans: every call that any of the token counts makes, and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dgmoe_ops
from dgmoe_ops import LayerShape, layouts, plan_warmup
from dgmoe_ops.formats.gemm import GroupedGemmSpec
from dgmoe_ops.formats.layout import Layout
from dgmoe_ops.formats.recipes import RECIPES
from dgmoe_ops.warmup.run import KernelCall

SIZES = st.builds(
    LayerShape,
    experts=st.integers(1, 40),
    hidden=st.integers(1, 700),
    intermediate=st.integers(1, 700),
    top_k=st.integers(1, 9),
    recipe=st.sampled_from(list(RECIPES)),
    num_experts=st.integers(40, 300),
)
SMALL = LayerShape(4, 256, 128, 2, "bf16")


def by_hand(shape: LayerShape, tokens: int, layout: str) -> set[KernelCall]:
    """The two calls of one token count, from the definitions."""
    if tokens == 0:
        return set()
    to = RECIPES[shape.recipe].k_multiple
    hidden, inter = (-(-size // to) * to for size in (shape.hidden, shape.intermediate))
    mx = {"mxfp8": ((1, 32), (1, 32)), "mxfp4": ((1, 128), (1, 32))}
    columns = mx.get(shape.recipe, (None, None))
    total = shape.num_experts or shape.experts
    if layout == "masked":
        m, hint, aligned = layouts.slab_rows(tokens), -(-tokens * shape.top_k // total), None
    else:
        m = layouts.contig_rows(tokens * shape.top_k, shape.experts, 128)
        hint, aligned = 0, 128
    return {
        KernelCall(
            GroupedGemmSpec(
                Layout(layout), shape.experts, m, n, k, hint, *columns, shape.recipe == "mxfp4"
            ),
            shape.recipe,
            aligned,
        )
        for n, k in ((2 * inter, hidden), (-(-shape.hidden // 8) * 8, inter))
    }


@given(shape=SIZES, first=st.integers(0, 900), length=st.integers(0, 700))
def test_property_a_span_has_the_calls_of_every_count_and_no_other(shape, first, length) -> None:
    for layout in ("masked", "contig"):
        plan = plan_warmup(shape, tokens=(first, first + length), layouts=layout)
        wanted = [by_hand(shape, count, layout) for count in range(first, first + length + 1)]
        assert set(plan) == set().union(*wanted)
        assert len(plan) == len(set(plan))


@given(shape=SIZES, tokens=st.lists(st.integers(0, 5000), max_size=6))
def test_property_a_list_has_the_calls_of_its_counts(shape, tokens) -> None:
    plan = plan_warmup(shape, tokens=tokens)
    pairs = itertools.product(tokens, ("masked", "contig"))
    assert set(plan) == set().union(*(by_hand(shape, count, layout) for count, layout in pairs))
    assert len(plan) == len(set(plan))


def test_huge_spans_stay_cheap_and_whole() -> None:
    """No count is asked for one by one: the span has 16 million."""
    shape = LayerShape(8, 256, 128, 1, "bf16", num_experts=2**20)
    plan = plan_warmup(shape, tokens=(1, 2**20), layouts="masked")
    assert len({call.spec.m for call in plan}) == 2**20 // 256
    assert {call.spec.expected_m for call in plan} == {1}


def test_ways_to_name_token_counts() -> None:
    whole = plan_warmup(SMALL, tokens=(1, 300))
    assert plan_warmup(SMALL, tokens=range(1, 301)) == whole
    assert plan_warmup(SMALL, tokens=range(300, 0, -1)) == whole
    assert set(plan_warmup(SMALL, tokens=list(range(1, 301)))) == set(whole)
    assert plan_warmup(SMALL, tokens=range(1, 9, 7)) == plan_warmup(SMALL, tokens=[1, 8])
    assert plan_warmup(SMALL, tokens=(3, 4, 5)) == plan_warmup(SMALL, tokens=[3, 4, 5])
    assert plan_warmup(SMALL, tokens=[]) == plan_warmup(SMALL, tokens=[0]) == []


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (5, "be a list, a range or a pair (first, last), got 5"),
        ([1, -1], "be an int of at least 0, got -1"),
        ([True], "be an int of at least 0, got True"),
        ((9, 8), "be a pair (first, last) in order, got (9, 8)"),
        ([1.5], "be an int of at least 0, got 1.5"),
    ],
)
def test_token_counts_that_are_none(tokens, says) -> None:
    with pytest.raises(ValueError) as caught:
        plan_warmup(SMALL, tokens=tokens)
    assert f"dgmoe_ops.warmup: tokens must {says}" in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"what": LayerShape(0, 8, 8, 1)}, "experts must be an int of at least 1, got 0"),
        ({"what": LayerShape(1, 8, 8, 1, "fp7")}, "recipe must be one of bf16, fp8_block"),
        ({"what": LayerShape(8, 8, 8, 1, num_experts=4)}, "num_experts must be at least the local"),
        ({"what": LayerShape(8, 8, 8, 0)}, "top_k must be an int of at least 1, got 0"),
        ({"recipe": "fp8_block"}, "recipe must be 'bf16', as the layer has it, got 'fp8_block'"),
        ({"top_k": 3}, "top_k must be 2, as the layer has it, got 3"),
        ({"layouts": ("masked", "auto")}, "layouts must be of masked, contig, got 'auto'"),
        ({"alignment": 0}, "alignment must be an int of at least 1, got 0"),
        ({"what": []}, "what must name at least one layer, got []"),
        ({"what": torch.nn.Linear(2, 2)}, "what must hold MoEWeights or a pair of tensors w13"),
        ({"what": "model"}, "what must be MoEWeights, a module, a LayerShape or a list of these"),
    ],
)
def test_what_is_refused(kwargs, says) -> None:
    with pytest.raises(ValueError) as caught:
        plan_warmup(**{"what": SMALL, "tokens": [1], **kwargs})
    assert f"dgmoe_ops.warmup: {says}" in str(caught.value)


def weights(recipe: str, hidden: int = 300, inter: int = 200, target: str = "cpu"):
    w13 = torch.zeros(3, 2 * inter, hidden, dtype=torch.bfloat16)
    w2 = torch.zeros(3, hidden, inter, dtype=torch.bfloat16)
    return dgmoe_ops.prepare_weights(w13, None, w2, None, recipe=recipe, target=target)


@pytest.mark.parametrize("target", ["cpu", "sm100"])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_weights_plan_like_their_shape(recipe, target) -> None:
    prepared = weights(recipe, target=target)
    shape = LayerShape(3, 300, 200, 2, recipe, num_experts=12)
    want = plan_warmup(shape, tokens=(1, 400))
    assert plan_warmup(prepared, tokens=(1, 400), top_k=2, num_experts=12) == want
    with pytest.raises(ValueError, match="top_k must be given where the layer does not name it"):
        plan_warmup(prepared, tokens=[1])


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_tensors_tell_the_recipe(recipe) -> None:
    """Of weights in a module's own buffers: by dtype and, for FP8, by the shape of the scales."""
    prepared, held = weights(recipe), torch.nn.Module()
    for name, tensor in zip(("w13", "w13_scale", "w2", "w2_scale"), prepared.tensors, strict=True):
        held.register_buffer(name, tensor)
    want = plan_warmup(prepared, tokens=[1, 300], top_k=2)
    assert plan_warmup(held, tokens=[1, 300], top_k=2) == want
    assert {call.recipe for call in want} == {recipe}
    other = "mxfp8" if recipe != "mxfp8" else "fp8_block"
    with pytest.raises(ValueError, match=f"recipe must be '{recipe}', as the layer has it, got"):
        plan_warmup(held, tokens=[1], top_k=2, recipe=other)
    # Rows this short have one word of scales either way: only the recipe tells them apart.
    if recipe == "mxfp8":
        short = weights(recipe, hidden=100, inter=100).tensors
        held.w13, held.w13_scale, held.w2, held.w2_scale = short
        assert plan_warmup(held, tokens=[1], top_k=2)[0].recipe == "fp8_block"
        assert plan_warmup(held, tokens=[1], top_k=2, recipe=recipe)[0].recipe == recipe


class Experts(torch.nn.Module):
    def __init__(self, **held) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)


def test_modules_hold_layers_in_many_ways() -> None:
    def plan(what, **kwargs):
        return plan_warmup(what, tokens=[1, 300], **kwargs)

    fp8, bf16 = weights("fp8_block"), weights("bf16", hidden=64)
    want = {recipe: plan(w, top_k=2) for recipe, w in (("fp8_block", fp8), ("bf16", bf16))}
    assert plan(Experts(prepared=fp8), top_k=2) == want["fp8_block"]
    both = want["fp8_block"] + want["bf16"]
    for held in ([fp8, bf16], (fp8, bf16), {"a": fp8, "b": bf16}):
        assert plan(Experts(layers=held, top_k=2)) == both
    assert plan([Experts(one=fp8), bf16], top_k=2) == both

    pair = Experts(w13=torch.nn.Parameter(bf16.w13), w2=torch.nn.Parameter(bf16.w2))
    assert plan(pair, top_k=2) == want["bf16"]
    buffers = Experts(top_k=2)
    for name, tensor in zip(("w13", "w13_scale", "w2", "w2_scale"), fp8.tensors, strict=True):
        buffers.register_buffer(name, tensor)
    assert plan(buffers) == want["fp8_block"]
    named = Experts(w13_weight=bf16.w13, w2_weight=bf16.w2, top_k=2)
    assert plan(named) == want["bf16"]

    # Layers of equal sizes are one; top_k and num_experts may stand above.
    blocks = torch.nn.ModuleList(Experts(experts=Experts(w=fp8)) for _ in range(5))
    model = Experts(blocks=blocks, top_k=2, num_experts=3)
    assert plan(model) == want["fp8_block"]
    model.num_experts = 30
    assert plan(model) == plan(fp8, top_k=2, num_experts=30)
    assert plan(model) != want["fp8_block"]
    blocks[3].top_k = 1
    assert set(plan(model)) > set(plan(fp8, top_k=2, num_experts=30))


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (
            {"w13": torch.zeros(2, 8, 4), "w2": torch.zeros(2, 4, 4)},
            "deep.w13 must have weights as",
        ),
        (
            {"w13": torch.zeros(2, 8, 4).bfloat16(), "w2": torch.zeros(2, 4, 5).bfloat16()},
            "deep.w13 must have weights (",
        ),
        (
            {"w13": torch.zeros(2, 8, 4).bfloat16(), "w2": torch.zeros(2, 4, 4).to(torch.int8)},
            "deep.w13 must have weights as",
        ),
        ({"w13": torch.zeros(8, 4), "w2": torch.zeros(4, 4)}, "deep.w13 must have weights ("),
    ],
)
def test_pairs_that_are_no_layer_are_named(held, says) -> None:
    with pytest.raises(ValueError) as caught:
        plan_warmup(Experts(deep=Experts(**held)), tokens=[1], top_k=1)
    assert f"dgmoe_ops.warmup: {says}" in str(caught.value)
