"""What a device does not take is refused before anything runs, in the words of the layer's
arguments; devices are made up, tensors are on the CPU."""

import pytest
import torch

import dgmoe_ops
from dgmoe_ops.backends import platforms
from dgmoe_ops.formats.layouts import Layout, LayoutFacts, choose_layout, explain_layout
from dgmoe_ops.layer import checks, stages
from dgmoe_ops.layer import fused_moe as layer_module
from dgmoe_ops.layer.device import Device


def pretend(monkeypatch, arch) -> None:
    known = Device(arch, 80 << 30)
    monkeypatch.setattr(checks, "_known", {})
    for module in (checks, layer_module):
        monkeypatch.setattr(module, "device_of", lambda device: known)


def layer(recipe: str, target: str, tokens=17, experts=4, hidden=256, inter=128):
    g = torch.Generator().manual_seed(1)
    w13 = torch.randn(experts, 2 * inter, hidden, generator=g).bfloat16()
    w2 = torch.randn(experts, hidden, inter, generator=g).bfloat16()
    prepared = dgmoe_ops.prepare_weights(w13, None, w2, None, recipe=recipe, target=target)
    ids = torch.arange(tokens)[:, None] % (experts - 1)  # the last expert has no token
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    return [x, torch.ones(tokens, 1), ids, *prepared.tensors]


def refused(monkeypatch, args, match: str, **kwargs) -> None:
    """Refused, and no op has run before."""

    def run(*_):
        raise AssertionError("placed before it was refused")

    nothing = {name: ops._replace(place=run) for name, ops in stages.OPS.items()}
    with monkeypatch.context() as patch:
        patch.setattr(stages, "OPS", nothing)
        for call in (dgmoe_ops.fused_moe_inline, torch.ops.dgmoe.fused_moe):
            with pytest.raises(ValueError, match=match):
                call(*args, **kwargs)


@pytest.mark.parametrize("arch", [90, 100, 103, 120, 121])
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_every_legal_cell_passes_and_auto_takes_one(monkeypatch, arch, tokens) -> None:
    pretend(monkeypatch, arch)
    target = platforms.platform_of(arch).target
    for recipe in platforms.RECIPES:
        legal = platforms.layouts_of(arch, recipe)
        if not legal:
            continue
        args = layer(recipe, target, tokens)
        results = [
            dgmoe_ops.fused_moe_inline(*args, recipe=recipe, layout=layout)
            for layout in ("auto", *legal)
        ]
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("arch", [120, 121])
def test_contig_only(monkeypatch, arch) -> None:
    pretend(monkeypatch, arch)
    args = layer("fp8_block", "sm120")
    refused(
        monkeypatch,
        args,
        f"fused_moe: layout must be contig for recipe fp8_block on SM{arch}, got 'masked'",
        layout="masked",
    )
    monkeypatch.setenv("DGMOE_LAYOUT", "masked")
    refused(monkeypatch, args, f"DGMOE_LAYOUT must be contig on SM{arch}, got masked")


@pytest.mark.parametrize(
    ("arch", "recipe", "target", "match"),
    [
        (120, "mxfp8", "sm100", "recipe must be one that SM120 runs .mxfp8 runs on CPU, SM90, "),
        (80, "bf16", "cpu", "hidden_states must be on a device that grouped GEMMs exist for"),
        (100, "fp8_block", "cpu", "w13_scale and w2_scale must be packed_ue8m0 .* on SM100"),
        (90, "fp8_block", "sm100", "w13_scale and w2_scale must be block_fp32 .* on SM90"),
    ],
)
def test_what_runs_nowhere_there(monkeypatch, arch, recipe, target, match) -> None:
    pretend(monkeypatch, arch)
    refused(monkeypatch, layer(recipe, target), match, recipe=recipe)


def changed(args: list, at: int, change) -> list:
    return [change(arg) if i == at else arg for i, arg in enumerate(args)]


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one element past 16 bytes."""
    room = torch.empty(tensor.numel() + 32, dtype=tensor.dtype)
    begin = (-room.data_ptr() % 16) // tensor.element_size() + 1
    view = room[begin:].as_strided(tensor.shape, tensor.stride())
    view.view(torch.int8 if tensor.element_size() == 1 else tensor.dtype).copy_(
        tensor.view(torch.int8 if tensor.element_size() == 1 else tensor.dtype)
    )
    return view


def test_scales_and_addresses(monkeypatch) -> None:
    args = layer("fp8_block", "sm100", hidden=1024)
    pretend(monkeypatch, 100)
    row_major = changed(args, 4, torch.Tensor.contiguous)
    refused(monkeypatch, row_major, "w13_scale must be MN-major and TMA-aligned on SM100")
    for at, name in ((3, "w13"), (4, "w13_scale"), (5, "w2")):
        moved = changed(args, at, shifted)
        refused(monkeypatch, moved, f"fused_moe: {name} must start on 16 bytes on SM100, got an")
    pretend(monkeypatch, 90)
    blocks = layer("fp8_block", "sm90", hidden=512)
    turned = changed(blocks, 4, lambda s: s.transpose(1, 2).contiguous().transpose(1, 2))
    refused(monkeypatch, turned, "w13_scale must be contiguous on SM90")


def test_sizes(monkeypatch) -> None:
    pretend(monkeypatch, 90)
    x, weights, ids, *_ = layer("bf16", "cpu")
    w13, w2 = torch.zeros(4, 256, 256).bfloat16(), torch.zeros(4, 256, 128).bfloat16()
    odd = [x, weights, ids, w13[:, :200].contiguous(), None, w2[..., :100].contiguous(), None]
    refused(monkeypatch, odd, "w2 must have a multiple of 64 columns on SM90", recipe="bf16")
    odd = [x, weights, ids, w13[:, :250].contiguous(), None, w2[..., :125].contiguous(), None]
    refused(monkeypatch, odd, "w13 must have a multiple of 8 rows on SM90", recipe="bf16")


@pytest.mark.parametrize(("arch", "rows"), [(90, 64), (100, 96), (120, 96)])
def test_an_alignment_that_segments_do_not_have(monkeypatch, arch, rows) -> None:
    pretend(monkeypatch, arch)
    args = layer("bf16", "cpu")
    with dgmoe_ops.contiguous_alignment(rows):
        match = f"contiguous_alignment must be one of .* on SM{arch}.*, got {rows}"
        refused(monkeypatch, args, match, recipe="bf16", layout="contig")
        if arch != 120:  # slabs have no segments
            dgmoe_ops.fused_moe_inline(*args, recipe="bf16", layout="masked")


def test_the_chain_asks_the_platform_before_the_device() -> None:
    facts = LayoutFacts("auto", 64, 8, 8, 1024, 512, True, 80 << 30, (Layout.CONTIG,), "SM120")
    explained = explain_layout(facts)
    assert (explained.layout, explained.decided_by) == ("contig", "platform")
    assert choose_layout(facts) is Layout.CONTIG
    assert choose_layout(facts._replace(legal=tuple(Layout))) is Layout.MASKED
    with pytest.raises(ValueError, match="layout must be contig on SM120, got masked"):
        choose_layout(facts._replace(argument="masked"))
