"""Scopes on the kernels of the MX recipes on SM90, and on Triton where these leave a GEMM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mx_operands import LAYOUTS, RECIPES, Product
from torch.profiler import ProfilerActivity, profile

import dgmoe_ops
from dgmoe_ops.backends.scopes import Overlap, scope

#: rows that a call is told of, and columns: each of our kernels, then Triton, which odd n leaves
KERNELS = {"small": (5, 200), "medium": (50, 200), "large": (384, 200), "Triton": (50, 196)}


@pytest.fixture(autouse=True)
def needs_hopper(device):
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("runs with --device cuda on an SM90 GPU")


@pytest.fixture(params=list(KERNELS))
def kernel(request) -> str:
    if request.param == "Triton":
        pytest.importorskip("triton")
    return request.param


def product_of(kernel: str, layout: str, recipe: str = "mxfp4") -> Product:
    expected_m, n = KERNELS[kernel]
    counts = {"small": [3, 0, 12, 1], "large": [300, 0, 384, 129]}.get(kernel, [40, 0, 20, 150])
    if layout == "contig":
        # Kernels follow from segments: fewer than experts, about as many, and more.
        counts = {"small": [3] + [0] * 7, "large": [300, 0, 384, 129]}.get(kernel, counts)
    return Product(recipe, layout, counts, n, 640, expected_m)


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_fewer_multiprocessors_give_the_same_bits(kernel, recipe, layout, count, device) -> None:
    """Also one, where a cluster has two CTAs."""
    made = product_of(kernel, layout, recipe)
    wanted = made.check(device)
    with dgmoe_ops.num_sms(count):
        got = made.check(device)
    assert torch.equal(got.view(torch.int64), wanted.view(torch.int64))


@pytest.mark.parametrize("kernel", ["small", "medium", "large"])
def test_grids_shrink(kernel, tmp_path, device) -> None:
    """The persistent grid has no more CTAs than fit on the multiprocessors that are left."""
    expected_m, _ = KERNELS[kernel]
    made = Product("mxfp4", "masked", [300] * 16, 4096, 640, expected_m)

    def grid() -> int:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            made.check(device)
        trace = tmp_path / "trace.json"
        seen.export_chrome_trace(str(trace))
        events = json.loads(Path(trace).read_text())["traceEvents"]
        name = f"sm90_mx_{kernel}_m_kernel"
        return max(e["args"]["grid"][0] for e in events if name in e.get("name", ""))

    whole = grid()
    with dgmoe_ops.num_sms(7):
        part = grid()
    if kernel == "small":
        assert whole % 132 != 0 or part == whole // 132 * 7
        assert part < whole
    else:
        assert part == 6  # whole clusters


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_than_there_are_is_refused(kernel, layout, device) -> None:
    most = torch.cuda.get_device_properties(device).multi_processor_count
    made = product_of(kernel, layout)
    match = f"{layout}: num_sms must be at most {most}, the multiprocessors of the device, got"
    with dgmoe_ops.num_sms(most + 1), pytest.raises(ValueError, match=match):
        made.check(device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlap_is_refused(kernel, layout, device) -> None:
    made = product_of(kernel, layout)
    signal = torch.zeros(64, dtype=torch.int32, device=device)
    match = f"{layout}: overlap of the down GEMM is not available: this GEMM on SM90"
    with scope(overlap=Overlap(signal)), pytest.raises(RuntimeError, match=match):
        made.check(device)
    made.check(device)


@pytest.mark.parametrize("rows", [32, 64, 96])
def test_other_alignments_are_refused_and_do_not_reach_slabs(kernel, rows, device) -> None:
    made = product_of(kernel, "contig")
    match = f"contig: alignment must be one of 128 on SM90, got {rows}"
    with dgmoe_ops.contiguous_alignment(rows):
        with pytest.raises(ValueError, match=match):
            made.check(device)
        product_of(kernel, "masked").check(device)
    with dgmoe_ops.contiguous_alignment(128):
        made.check(device)


@pytest.mark.parametrize("rows", [32, 64, 96])
def test_deep_gemms_masked_slabs_keep_their_tiles(rows, device) -> None:
    """A slab of 256 rows is no multiple of 96."""
    pytest.importorskip("deep_gemm")
    op = torch.ops.dgmoe.grouped_gemm_nt_bf16_masked
    a = torch.randn(2, 256, 128, device=device).bfloat16()
    b = torch.randn(2, 128, 128, device=device).bfloat16()
    counts = torch.tensor([256, 200], dtype=torch.int32, device=device)
    wanted = op(a, b, counts, 256)
    with dgmoe_ops.contiguous_alignment(rows):
        got = op(a, b, counts, 256)
    for expert, count in enumerate(counts.tolist()):
        assert torch.equal(got[expert, :count], wanted[expert, :count])
