"""The formulas of `plan` against what the CUDA allocator was asked for."""

from __future__ import annotations

import gc

import pytest
import torch

pytest.importorskip("click")  # the formulas belong to the command line

from dgmoe_ops.analysis import memory  # noqa: E402
from dgmoe_ops.formats.layout import Layout  # noqa: E402
from dgmoe_ops.formats.recipes import RECIPES  # noqa: E402
from dgmoe_ops.testing.layer import layer_inputs  # noqa: E402


@pytest.fixture(autouse=True)
def needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("runs with --device cuda")


@pytest.mark.parametrize("layout", ["masked", "contig"])
@pytest.mark.parametrize("recipe", ["fp8_block", "bf16", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 32, 200, 1000])
def test_peak_is_what_the_formula_says(tokens, recipe, layout, device):
    """To the byte: `requested_bytes` counts what was asked for, before any rounding."""
    experts, top_k = 16, 4
    args, kwargs = layer_inputs(tokens, experts, top_k, recipe, device)
    hidden, inter = args[0].shape[1], args[5].shape[2]
    inter *= RECIPES[recipe].values_per_element
    major, minor = torch.cuda.get_device_capability(device)
    arch = 10 * major + minor
    sizes = (tokens, experts, experts, hidden, inter, top_k)
    call = memory.Call(*sizes, RECIPES[recipe], arch=arch)
    torch.ops.dgmoe.fused_moe(*args, layout=layout, **kwargs)  # loads kernels, proves the fit
    gc.collect()  # what the proof left in cycles
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats(device)
    out = torch.ops.dgmoe.fused_moe(*args, layout=layout, **kwargs)
    peak = torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before
    place, *others = memory.stages(call, Layout(layout))
    # 250 rows an expert, 50, 8, or one of some; 8 may be any number in segments, of which there are
    # as many as experts
    small = tokens == 1 or (tokens, layout) == (32, "masked")
    takes = "workspace" if arch == 90 and RECIPES[recipe].mx and not small else None
    scratch = [next(iter(stage.scratch), None) for stage in others]
    assert scratch == [takes, None, takes, None]
    assert max(stage.live for stage in others) >= place.live, "the ranking's scratch would count"
    assert peak == memory.peak(call, Layout(layout))
    assert out.shape == (tokens, hidden)
