"""The demo's parts on a tiny random Llama: the split equals the FFN, the router's ids are valid."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from smollm2_moe.moe import MoEFeedForward  # noqa: E402
from smollm2_moe.split import assign_balanced, split_ffn  # noqa: E402
from smollm2_moe.text import CALIBRATION_MODULES, EVALUATION_MODULES, is_prose  # noqa: E402

HIDDEN, INTERMEDIATE, EXPERTS, TOKENS = 72, 96, 6, 40


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def inputs():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def split(model, inputs):
    ffn = model.model.layers[0].mlp
    weights = (ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight)
    return split_ffn(*weights, inputs, EXPERTS)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.float() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("recipe, bound", [("bf16", 0.02), ("fp8_block", 0.1)])
def test_all_experts_equal_the_dense_ffn(model, split, inputs, recipe, bound):
    expected = model.model.layers[0].mlp(inputs)
    assert relative_error(MoEFeedForward(split, recipe, EXPERTS)(inputs), expected) < bound


def test_split_is_a_permutation_of_the_neurons(model, split):
    gate = model.model.layers[0].mlp.gate_proj.weight
    rows = split.w13[:, : INTERMEDIATE // EXPERTS].reshape(INTERMEDIATE, HIDDEN)
    assert torch.equal(rows.sort(dim=0).values, gate.sort(dim=0).values)


def test_split_refuses_unequal_experts(model, inputs):
    ffn = model.model.layers[0].mlp
    weights = (ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight)
    with pytest.raises(ValueError, match="experts must divide 96, got 7"):
        split_ffn(*weights, inputs, 7)


@pytest.mark.parametrize("top_k", [1, 4, EXPERTS])
def test_router_gives_valid_ids(split, inputs, top_k):
    weights, ids = MoEFeedForward(split, "bf16", top_k).route(inputs)
    assert ids.shape == weights.shape == (TOKENS, top_k)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert ids.min() >= 0 and ids.max() < EXPERTS
    assert all(len(set(row)) == top_k for row in ids.tolist())


def test_router_beats_chance(model, split, inputs):
    expected = model.model.layers[0].mlp(inputs)
    moe = MoEFeedForward(split, "bf16", 4)
    routed = (moe(inputs) - expected).norm()
    moe.router = -moe.router
    assert routed < (moe(inputs) - expected).norm()


def test_model_runs_and_generates_with_the_layer(model, split):
    dense = model.model.layers[0].mlp
    ids = torch.arange(2 * 7).view(2, 7)
    expected = model(ids).logits
    try:
        model.model.layers[0].mlp = MoEFeedForward(split, "bf16", EXPERTS)
        assert relative_error(model(ids).logits, expected) < 0.05
        lengths = {"max_new_tokens": 3, "min_new_tokens": 3}
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, **lengths)
        assert out.shape == (2, 10)
    finally:
        model.model.layers[0].mlp = dense


def test_balanced_assignment_gives_every_expert_its_share():
    scores = torch.randn(48, 6, generator=torch.Generator().manual_seed(2))
    scores[:, 0] += 10  # everybody wants the same expert
    assert torch.bincount(assign_balanced(scores), minlength=6).tolist() == [8] * 6


def test_prose_is_told_from_code():
    sentence = "Return the number of items, which the caller may change while the iteration runs."
    assert is_prose(sentence)
    assert not is_prose(">>> " + sentence)
    assert not is_prose("    " + sentence)
    assert not is_prose("A short one.")
    assert not set(CALIBRATION_MODULES) & set(EVALUATION_MODULES)
