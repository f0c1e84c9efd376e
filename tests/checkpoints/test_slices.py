"""A rank's part of a layer: experts, and parts of the intermediate size."""

from __future__ import annotations

import pytest
import torch
from checkpoint_files import PREFIX, layer, named, write
from helpers import same_bits

from dgmoe_ops import fused_moe, load_moe_layer, prepare_weights
from dgmoe_ops.testing.layer import relative_error

pytest.importorskip("safetensors")

#: layout, form, intermediate size, parts, steps in which it can be cut
CASES = [
    ("qwen3_moe", "bf16", 96, 4, 1),
    ("fused", "bf16", 90, 3, 1),
    ("gpt_oss_bf16", "bf16", 90, 3, 1),
    ("deepseek_v3", "fp8_block", 512, 2, 128),
    ("fused_scale_inv", "fp8_block", 384, 3, 128),
    ("weight_scale", "fp8_tensor", 96, 3, 1),
    ("weight_scale", "mxfp8", 192, 3, 32),
    ("deepseek_v4", "mxfp4", 192, 3, 32),
    ("fused_scale_inv", "mxfp4", 128, 4, 32),
    ("gpt_oss", "mxfp4", 192, 2, 32),
]


def part(given, low: int, high: int):
    """Columns low to high of the intermediate size of a layer that is no more than tensors."""
    w13, s13, w2, s2 = given
    inter = w13.shape[1] // 2

    def rows(tensor, unit):
        gate, up = tensor.view(torch.uint8).chunk(2, 1)
        both = [half[:, low // unit : -(-high // unit)] for half in (gate, up)]
        return torch.cat(both, 1).view(tensor.dtype)

    def columns(tensor):
        count = inter // tensor.shape[2]
        return tensor[:, :, low // count : high // count].contiguous()

    if s13 is None or s13.dim() == 2:
        return rows(w13, 1), s13, columns(w2), s2
    unit = inter // (s13.shape[1] // 2)
    return rows(w13, 1), rows(s13, unit), columns(w2), columns(s2)


def same_tensors(a, b) -> bool:
    return all(x is y or same_bits(x, y) for x, y in zip(a.tensors, b.tensors, strict=True))


@pytest.mark.parametrize(("layout", "form", "inter", "parts", "unit"), CASES)
def test_parts_of_the_intermediate_size(tmp_path, layout, form, inter, parts, unit) -> None:
    given = layer(form, 2, 128, inter)
    bias = None
    if layout.startswith("gpt_oss"):
        bias = torch.arange(2 * 2 * inter).view(2, -1).float(), torch.ones(2, 128)
    path = write(tmp_path, named(layout, *given, bias))
    recipe = {"bf16": "bf16", "mxfp8": "mxfp8", "mxfp4": "mxfp4"}.get(form, "fp8_block")
    size = inter // parts
    for rank in range(parts):
        found = load_moe_layer(path, PREFIX, tp_rank=rank, tp_size=parts)
        low = rank * size
        wanted = prepare_weights(*part(given, low, low + size), recipe)
        assert same_tensors(found, wanted) and found.intermediate_size == size
        if bias is None:
            assert not found.biases
            continue
        halves = found.w13_bias.view(2, 2, -1)
        assert torch.equal(halves[:, :, :size], bias[0].view(2, 2, -1)[:, :, low : low + size])
        assert not halves[:, :, size:].any()
        assert (found.w2_bias is None) == (rank > 0)
    if unit == 1:
        return
    says = (
        rf"{PREFIX}.experts.*scale\S* must be cut into whole groups of {unit}, .* size of {inter}"
    )
    with pytest.raises(
        ValueError, match=rf"{says}, got a part from 0 to {inter // (2 * inter // unit)}"
    ):
        load_moe_layer(path, PREFIX, tp_size=2 * inter // unit)


@pytest.mark.parametrize("layout", ["deepseek_v4", "gpt_oss", "fused_scale_inv"])
def test_experts_of_a_rank(tmp_path, layout) -> None:
    given = layer("mxfp4", 6, 128, 64)
    bias = (torch.randn(6, 128), torch.randn(6, 128)) if layout == "gpt_oss" else None
    path = write(tmp_path, named(layout, *given, bias))
    for start, stop in ((0, 2), (2, 5), (5, 6), (0, 6)):
        found = load_moe_layer(path, PREFIX, experts=(start, stop))
        wanted = prepare_weights(*(tensor[start:stop] for tensor in given), "mxfp4")
        assert same_tensors(found, wanted)
        if bias is not None:
            gate = bias[0][start:stop, :64]
            assert torch.equal(found.w13_bias[:, :64], gate)
            assert torch.equal(found.w2_bias, bias[1][start:stop])


def test_a_file_with_only_the_experts_of_a_rank(tmp_path) -> None:
    given = layer("mxfp4", 6, 128, 64)
    tensors = named("deepseek_v4", *given)
    few = {name: t for name, t in tensors.items() if name.split(".")[5] in ("3", "4")}
    path = write(tmp_path, few)
    found = load_moe_layer(path, PREFIX, experts=(3, 5))
    assert same_tensors(found, prepare_weights(*(t[3:5] for t in given), "mxfp4"))
    says = r"the checkpoint must have the 30 tensors of experts 0 to 4 .* got one without .*\.0\.w1"
    with pytest.raises(ValueError, match=says):
        load_moe_layer(path, PREFIX)


@pytest.mark.parametrize("layout", ["fused", "gpt_oss_bf16"])
def test_ranks_sum_to_the_layer(tmp_path, layout) -> None:
    """Experts of two ranks, each in two parts: the outputs of the four are the layer's summands."""
    given = layer("bf16", 4, 128, 96)
    g = torch.Generator().manual_seed(1)
    bias = (torch.randn(4, 192, generator=g), torch.randn(4, 128, generator=g))
    bias = bias if layout == "gpt_oss_bf16" else None
    path = write(tmp_path, named(layout, *given, bias))
    x = torch.randn(19, 128, generator=g).bfloat16()
    weights, ids = torch.rand(19, 4, generator=g).topk(2)
    call = {"recipe": "bf16", "num_experts": 4}
    whole = load_moe_layer(path, PREFIX)
    want = fused_moe(x, weights, ids, *whole.tensors, **call, **whole.biases).double()
    found = torch.zeros(19, 128, dtype=torch.float64)
    for start in (0, 2):
        for rank in (0, 1):
            one = load_moe_layer(path, PREFIX, experts=(start, start + 2), tp_rank=rank, tp_size=2)
            call["expert_start"] = start
            found += fused_moe(x, weights, ids, *one.tensors, **call, **one.biases).double()
    assert relative_error(found, want) < 8e-3
