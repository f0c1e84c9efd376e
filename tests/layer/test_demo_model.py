"""The demo and its parts on a tiny random Llama: the split equals the FFN, every recipe comes close
to it, the router's ids are valid, a bound that fails is a failure."""

from __future__ import annotations

import argparse
import dataclasses
import io
import math
import re
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import demo  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from smollm2_moe import checkpoint, variants  # noqa: E402
from smollm2_moe.moe import MoEFeedForward  # noqa: E402
from smollm2_moe.report import print_checks  # noqa: E402
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


def moe(split, variant, top_k=EXPERTS):
    return MoEFeedForward(split.router, variants.prepare(split, variant), top_k)


ERRORS = {
    variants.BF16: 0.02,
    variants.FP8_FP32: 0.1,
    variants.FP8_UE8M0: 0.1,
    variants.MXFP8: 0.1,
    variants.MXFP4: 0.4,
    variants.MXFP4_SEARCH: 0.4,
    variants.FP8_FROM_MXFP4: 0.4,
}


@pytest.mark.parametrize("variant", variants.VARIANTS, ids=lambda v: v.name)
def test_all_experts_equal_the_dense_ffn(model, split, inputs, variant):
    expected = model.model.layers[0].mlp(inputs)
    assert relative_error(moe(split, variant)(inputs), expected) < ERRORS[variant]


@pytest.mark.parametrize("variant", variants.VARIANTS, ids=lambda v: v.name)
def test_variants_are_what_they_say(split, variant):
    prepared = variants.prepare(split, variant)
    dtypes = {"none": None, "block_fp32": torch.float32, "packed_ue8m0": torch.int32}
    scale = prepared.w13_scale
    assert (scale if scale is None else scale.dtype) == dtypes[variant.scales]
    assert prepared.recipe == variant.recipe
    layer = MoEFeedForward(split.router, prepared, EXPERTS)
    assert layer.expert_bytes == sum(
        buffer.numel() * buffer.element_size()
        for name, buffer in layer.named_buffers()
        if name != "router"
    )


def test_fp4_weights_take_half_the_bytes_of_fp8(split):
    sizes = {v: variants.prepare(split, v).nbytes for v in variants.VARIANTS}
    assert sizes[variants.MXFP4] == sizes[variants.MXFP4_SEARCH] < 0.6 * sizes[variants.MXFP8]


def test_searched_exponents_come_closer(model, split, inputs):
    expected = model.model.layers[0].mlp(inputs)
    plain, search = (
        (moe(split, v)(inputs) - expected).norm() for v in (variants.MXFP4, variants.MXFP4_SEARCH)
    )
    assert search < 0.99 * plain


def test_fp8_keeps_the_values_of_mxfp4(split, inputs):
    fp4 = moe(split, variants.MXFP4_SEARCH)(inputs)
    # With the same form of scales the activations are quantised alike, and only sums differ.
    packed = dataclasses.replace(variants.FP8_FROM_MXFP4, scales="packed_ue8m0")
    assert relative_error(moe(split, packed)(inputs), fp4) < 0.01


def test_a_variant_that_the_device_cannot_run_is_refused(split, monkeypatch):
    monkeypatch.setattr(variants, "target_of", lambda variant, device: None)
    with pytest.raises(ValueError, match="variant must run on cpu, got mxfp4"):
        variants.prepare(split, variants.MXFP4)


@pytest.mark.parametrize(
    "capability, runs",
    [
        ((9, 0), set(variants.VARIANTS) - {variants.FP8_UE8M0}),
        ((10, 0), set(variants.VARIANTS) - {variants.FP8_FP32, variants.FP8_FROM_MXFP4}),
    ],
)
def test_targets_on_a_gpu(monkeypatch, capability, runs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    assert {v for v in variants.VARIANTS if variants.target_of(v, device)} == runs


def perplexities(**changed):
    value = dict.fromkeys(variants.VARIANTS, 10.1)
    value[variants.MXFP4] = 12.5
    value[variants.MXFP4_SEARCH] = value[variants.FP8_FROM_MXFP4] = 12.0
    return value | {getattr(variants, name): v for name, v in changed.items()}


@pytest.mark.parametrize(
    "changed, held",
    [
        ({}, True),
        ({"BF16": 20.0}, True),  # has a bound of its own: the split's error
        ({"FP8_FP32": 10.31}, False),
        ({"FP8_UE8M0": 10.31}, False),
        ({"MXFP8": 10.31}, False),
        ({"MXFP4": 13.51}, False),
        ({"MXFP4": math.nan}, False),
        ({"MXFP4_SEARCH": 12.5}, False),
        ({"FP8_FROM_MXFP4": 12.13}, False),
    ],
)
def test_a_bound_that_fails_is_a_failure(changed, held):
    console = Console(file=io.StringIO(), width=140)
    checks = variants.checks(perplexities(**changed), 10.0)
    assert len(checks) == len(variants.BOUNDS)
    assert print_checks(console, checks) is held
    assert ("FAILED" in console.file.getvalue()) is not held


def test_rows_that_were_not_measured_are_not_checked():
    measured = {variants.MXFP8: 10.1, variants.MXFP4_SEARCH: 12.0}
    assert [check.what for check in variants.checks(measured, 10.0)] == [
        "perplexity of mxfp8 over dense"
    ]


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
    weights, ids = moe(split, variants.BF16, top_k).route(inputs)
    assert ids.shape == weights.shape == (TOKENS, top_k)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert ids.min() >= 0 and ids.max() < EXPERTS
    assert all(len(set(row)) == top_k for row in ids.tolist())


def test_router_beats_chance(model, split, inputs):
    expected = model.model.layers[0].mlp(inputs)
    layer = moe(split, variants.BF16, 4)
    routed = (layer(inputs) - expected).norm()
    layer.router = -layer.router
    assert routed < (layer(inputs) - expected).norm()


def test_model_runs_and_generates_with_the_layer(model, split):
    dense = model.model.layers[0].mlp
    ids = torch.arange(2 * 7).view(2, 7)
    expected = model(ids).logits
    try:
        model.model.layers[0].mlp = moe(split, variants.BF16)
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


class Letters:
    """A tokenizer of 64 letters, in place of one that must be downloaded."""

    def __call__(self, text, return_tensors="pt", verbose=True):
        ids = torch.tensor([[ord(letter) % 64 for letter in text]])
        data = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return transformers.BatchEncoding(data)

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i + 64) for i in ids.tolist())


def test_the_demo_runs_every_row(model, monkeypatch):
    dense = [layer.mlp for layer in model.model.layers]
    monkeypatch.setattr(checkpoint, "load", lambda device, dtype: (model, Letters()))
    monkeypatch.setattr(demo, "NEW_TOKENS", 2)
    args = argparse.Namespace(tokens=demo.WINDOW, top_k=[10], device=torch.device("cpu"))
    console = Console(file=io.StringIO(), width=140)
    try:
        verdict = demo.run(args, console, Progress(console=console, disable=True))
    finally:
        for layer, mlp in zip(model.model.layers, dense, strict=True):
            layer.mlp = mlp
    printed = console.file.getvalue()
    rows = re.findall(r"^│ (.*?) *│ +(\d+ of 12) │", printed, re.MULTILINE)
    every = [(variant.name, "12 of 12") for variant in variants.VARIANTS]
    assert rows == [*every, (variants.FP8_FP32.name, "10 of 12")]
    assert len(re.findall(r"^(ok|FAILED)  ", printed, re.MULTILINE)) == 1 + len(variants.BOUNDS)
    assert verdict is ("FAILED" not in printed)
