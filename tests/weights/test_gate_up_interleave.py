"""Rows of gate and up in turn, and biases, through prepare_weights: halves come out, padded."""

from __future__ import annotations

import pytest
import torch
from checkpoint_files import interleaved, layer
from helpers import same_bits

from dgmoe_ops import export_biases, fused_moe, moe_block, prepare_weights
from dgmoe_ops.testing.layer import relative_error

RECIPES = {"bf16": ("bf16", "fp8_block", "mxfp4"), "mxfp4": ("mxfp4", "fp8_block")}
RECIPES |= {"mxfp8": ("mxfp8",), "fp8_tensor": ("fp8_block",)}
CASES = [(form, recipe) for form, recipes in RECIPES.items() for recipe in recipes]

ORDER = "gate_up_interleave"


def turned(tensor: torch.Tensor | None, chunk: int, dim: int = 1) -> torch.Tensor | None:
    """Rows in turn; scales that no row has stay."""
    if tensor is None or tensor.dim() < 2 or tensor.shape[1] <= 2:
        return tensor
    as_bytes = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return interleaved(as_bytes, dim, chunk).view(tensor.dtype)


@pytest.mark.parametrize("target", ["cpu", "sm100"])
@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize(("form", "recipe"), CASES)
def test_every_form_comes_out_in_halves(form, recipe, chunk, target) -> None:
    w13, s13, w2, s2 = layer(form, 2, 160, 72)
    bias = torch.randn(2, 144), torch.randn(2, 160).bfloat16()
    wanted = prepare_weights(w13, s13, w2, s2, recipe, target, w13_bias=bias[0], w2_bias=bias[1])
    found = prepare_weights(
        turned(w13, chunk), turned(s13, chunk), w2, s2, recipe, target,
        gate_up_interleave=chunk, w13_bias=turned(bias[0], chunk), w2_bias=bias[1],
    )  # fmt: skip
    for one, other in zip(found.tensors, wanted.tensors, strict=True):
        assert one is other or same_bits(one, other)
    assert torch.equal(found.w13_bias, wanted.w13_bias)
    rows = found.w13.shape[1] // 2
    assert rows == 128 and found.w13_bias.shape == (2, 256)
    assert torch.equal(found.w13_bias[:, :72], bias[0][:, :72])
    assert torch.equal(found.w13_bias[:, rows : rows + 72], bias[0][:, 72:])
    assert not found.w13_bias[:, 72:rows].any() and not found.w13_bias[:, rows + 72 :].any()
    assert torch.equal(found.w2_bias, bias[1]) and found.w2_bias.dtype == torch.bfloat16
    for one, other in zip(export_biases(found), bias, strict=True):
        assert torch.equal(one, other)
    assert export_biases(prepare_weights(w13, s13, w2, s2, recipe, target)) == (None, None)


def test_halves_that_need_no_padding_are_copied_in_order() -> None:
    w13, _, w2, _ = layer("bf16", 2, 64, 64)
    found = prepare_weights(interleaved(w13), None, w2, None, "bf16", gate_up_interleave=1)
    assert torch.equal(found.w13, w13) and found.w2.data_ptr() == w2.data_ptr()


@pytest.mark.parametrize("inter", [64, 72])
def test_the_layer_is_the_same_as_with_rows_in_turn(device, inter) -> None:
    """What the layer computes from rows in turn, where nothing is padded, and from halves."""
    if device.type == "cuda" and inter % 64 != 0:
        pytest.skip("DeepGEMM takes widths in steps of 64, so that nothing unpadded compares")
    w13, _, w2, _ = (t if t is None else t.to(device) for t in layer("bf16", 4, 128, inter))
    target = "cpu" if device.type == "cpu" else "sm90"
    bias = {"w13_bias": torch.randn(4, 2 * inter), "w2_bias": torch.randn(4, 128)}
    bias = {name: one.to(device) for name, one in bias.items()}
    x = torch.randn(9, 128).bfloat16().to(device)
    weights, ids = torch.rand(9, 4).to(device).topk(2)
    swiglu = {"recipe": "bf16", "activation": "swigluoai"}
    turns = {"w13_bias": interleaved(bias["w13_bias"]), "w2_bias": bias["w2_bias"]}
    want = fused_moe(
        x, weights, ids, interleaved(w13), None, w2, None, gate_up_interleave=1, **turns, **swiglu
    )
    made = prepare_weights(
        interleaved(w13), None, w2, None, "bf16", target, gate_up_interleave=1, **turns
    )
    got = fused_moe(x, weights, ids, *made.tensors, **made.biases, **swiglu)
    assert relative_error(got.cpu(), want.cpu().double()) < 1e-6


def test_a_block_takes_the_biases_of_its_weights() -> None:
    w13, _, w2, _ = (t if t is None else t * 0.1 for t in layer("bf16", 4, 128, 64))
    bias = {"w13_bias": torch.randn(4, 128), "w2_bias": torch.randn(4, 128)}
    plain = prepare_weights(w13, None, w2, None, "bf16")
    made = prepare_weights(w13, None, w2, None, "bf16", **bias)
    x, gate = torch.randn(5, 128).bfloat16(), torch.randn(4, 128).bfloat16()
    want = moe_block(x, gate, plain, top_k=2, **bias)
    assert torch.equal(moe_block(x, gate, made, top_k=2), want)
    assert not torch.equal(moe_block(x, gate, plain, top_k=2), want)
    shared = prepare_weights(w13[:1], None, w2[:1], None, "bf16", w2_bias=bias["w2_bias"][:1])
    plain_shared = prepare_weights(w13[:1], None, w2[:1], None, "bf16")
    with_bias = moe_block(x, gate, plain, top_k=2, shared=shared).float()
    without = moe_block(x, gate, plain, top_k=2, shared=plain_shared).float()
    assert relative_error(with_bias - without, bias["w2_bias"][:1].expand(5, -1)) < 0.05
    assert made.nbytes == plain.nbytes + sum(one.nbytes for one in bias.values())
    with pytest.raises(ValueError, match=r"w13_bias must be None where weights bring one, got \(4"):
        moe_block(x, gate, made, top_k=2, w13_bias=bias["w13_bias"])


@pytest.mark.parametrize(
    ("form", "kwargs", "says"),
    [
        ("fp8_block", {ORDER: 1}, f"{ORDER} must be 0 for FP8 with a scale a 128x128.*got 1"),
        ("bf16", {ORDER: 2}, "gate_up_interleave must be one of 0, 1, 8, got 2"),
        ("bf16", {ORDER: 8}, "w13 must have rows of gate and up in whole chunks of 8, got 36"),
        ("bf16", {"w13_bias": torch.ones(2, 36)}, r"w13_bias must have shape \(2, 72\), got \(2,"),
        ("bf16", {"w2_bias": torch.ones(2, 72)}, r"w2_bias must have shape \(2, 64\), got \(2, 72"),
        ("bf16", {"w2_bias": torch.ones(2, 64).half()}, "w2_bias must be float32.*got float16"),
        ("bf16", {"w2_bias": torch.ones(2, 64, device="meta")}, "w2_bias must be on the device of"),
    ],
)  # fmt: skip
def test_bad_input(form, kwargs, says) -> None:
    recipe = "fp8_block" if form == "fp8_block" else "bf16"
    with pytest.raises(ValueError, match=says):
        prepare_weights(*layer(form, 2, 64, 36), recipe, **kwargs)


def test_prepared_tensors_have_no_turns() -> None:
    once = prepare_weights(*layer("mxfp4", 2, 128, 128), "mxfp4")
    with pytest.raises(
        ValueError, match="gate_up_interleave must be 0 for prepared weights.*got 1"
    ):
        prepare_weights(*once.tensors, "mxfp4", gate_up_interleave=1)
