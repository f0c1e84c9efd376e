"""Which kernel runs a grouped GEMM and what it allocates: by hand, at the edges of the rule."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import dgmoe_ops
from dgmoe_ops import config
from dgmoe_ops.analysis import memory
from dgmoe_ops.backends.heuristics import Kernel, gemm_plan
from dgmoe_ops.formats.gemm import GroupedGemmSpec
from dgmoe_ops.formats.layouts import Layout
from dgmoe_ops.formats.recipes import RECIPES
from dgmoe_ops.ops import gemm as ops_gemm

HEADER = Path(__file__).parents[2] / "csrc" / "gemm" / "heuristics.h"
SLAB = GroupedGemmSpec(Layout.MASKED, 8, 1024, 256, 256, 256, (1, 128), (1, 32))
SEGMENTS = dataclasses.replace(SLAB, layout=Layout.CONTIG, m=23 * 128, expected_m=0)
DENSE = dataclasses.replace(SLAB, layout=None, experts=1, expected_m=0)
BLOCKS = dataclasses.replace(SLAB, granularity_b=(128, 128))
BF16 = dataclasses.replace(SLAB, granularity_a=None, granularity_b=None)
CLUSTER = (Kernel.SM90_MX_MEDIUM_M, Kernel.SM90_MX_LARGE_M)


def aligned(size: int) -> int:
    """Each part of a workspace is on 128 bytes."""
    return -(-size // 128) * 128


def call_of(tokens: int, recipe: str, arch: int | str = 90, local: int = 8) -> memory.Call:
    return memory.Call(tokens, 8, local, 256, 128, 2, RECIPES[recipe], packed=True, arch=arch)


# ---- by hand ----


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_large_m_takes_two_bytes_a_value_flags_and_tiles(recipe) -> None:
    """1024 tokens, two of eight experts each: 256 rows an expert, in slabs of 1024 rows or in 8 +
    (2048 - 8) // 128 = 23 segments."""
    scratch = {
        layout: [stage.scratch for stage in memory.stages(call_of(1024, recipe), layout)]
        for layout in Layout
    }
    # 8 slabs of 8 M blocks, 256 and 128 columns; four int32 flags each; four int32 a tile, and
    # their number
    slabs = 8 * 8 * 16 + aligned(8 * 8 * 16 + 16)
    assert scratch["masked"][1] == {"workspace": 8 * 1024 * 256 * 2 + slabs}
    assert scratch["masked"][3] == {"workspace": 8 * 1024 * 128 * 2 + slabs}
    assert scratch["contig"][1] == {"workspace": 1507328 + 384 + 384}
    assert scratch["contig"][3] == {"workspace": 753664 + 384 + 384}
    assert not any(scratch[layout][i] for layout in scratch for i in (2, 4))


@pytest.mark.parametrize(("recipe", "factors"), [("mxfp8", 4), ("mxfp4", 1)])
def test_medium_m_takes_a_byte_a_value_factors_and_tiles(recipe, factors) -> None:
    """256 tokens: 64 rows an expert, in slabs of 256 rows or in 8 + (512 - 8) // 128 = 11 segments.
    The first GEMM has 256 columns, the second one 128."""
    scratch = {
        layout: [stage.scratch for stage in memory.stages(call_of(256, recipe), layout)]
        for layout in Layout
    }
    row = 256 + 2 * 4 * factors  # the factors of 128 columns are fp32
    slabs, segments = aligned(8 * 2 * 16 + 16), aligned(11 * 16 + 16)
    assert scratch["masked"][1] == {"workspace": 8 * 256 * row + slabs}
    assert scratch["masked"][3] == {"workspace": 8 * 256 * row // 2 + slabs}
    assert scratch["contig"][1] == {"workspace": 11 * 128 * row + segments}
    assert scratch["contig"][3] == {"workspace": 11 * 128 * row // 2 + segments}


def test_it_lives_with_the_input_and_the_output_of_its_gemm() -> None:
    stages = memory.stages(call_of(1024, "mxfp4"), Layout.MASKED)
    rows, kept = 8 * 1024, 8 * 4 + 1024 * 2 * 4  # masked_m, src2dst
    # mxfp4's activations: a byte a value, a word of scales for up to 512 columns
    x, act = rows * (256 + 4), rows * (128 + 4)
    gate_up, y = rows * 256 * 2, rows * 256 * 2
    assert stages[1].live == x + kept + gate_up + rows * 256 * 2 + 1024 + 1152
    assert stages[2].live == kept + gate_up + act
    assert stages[3].live == kept + act + y + rows * 128 * 2 + 1024 + 1152
    assert memory.peak(call_of(1024, "mxfp4"), Layout.MASKED) == stages[1].live == 10528816 + 112


@pytest.mark.parametrize(
    ("recipe", "arch"), [("mxfp4", "cpu"), ("mxfp8", 100), ("fp8_block", 90), ("bf16", 90)]
)
def test_other_recipes_and_devices_have_none(recipe, arch) -> None:
    for layout in Layout:
        here = memory.stages(call_of(1024, recipe, arch), layout)
        assert here == memory.stages(call_of(1024, recipe, "cpu"), layout)
        assert not here[1].scratch and not here[3].scratch


# ---- who takes what ----


@pytest.mark.parametrize(
    ("tokens", "masked", "contig"),
    [
        (0, False, False),
        (1, False, False),
        (3, False, False),  # (6 - 8) // 128 is none: fewer segments than experts
        (4, False, True),  # one segment an expert, which may be full
        (56, False, True),  # 14 rows an expert
        (57, True, True),
        (1024, True, True),
    ],
)
def test_small_m_adds_nothing(tokens, masked, contig) -> None:
    call = call_of(tokens, "mxfp8")
    for layout, takes in ((Layout.MASKED, masked), (Layout.CONTIG, contig)):
        stages = memory.stages(call, layout)
        assert [bool(stages[i].scratch) for i in (1, 3)] == [takes] * 2


def test_experts_of_other_ranks_share_the_rows() -> None:
    """The hint counts all experts, slabs those of this rank."""
    small, medium, large = (call_of(tokens, "mxfp4", local=2) for tokens in (56, 57, 289))
    assert not memory.stages(small, Layout.MASKED)[1].scratch
    assert memory.stages(medium, Layout.MASKED)[1].scratch == {
        "workspace": 2 * 256 * (256 + 8) + 128
    }
    assert memory.stages(large, Layout.MASKED)[1].scratch == {
        "workspace": 2 * 512 * 256 * 2 + 2 * 4 * 16 + 256
    }


@pytest.mark.parametrize(
    ("gemm", "changes", "kernel"),
    [
        (SLAB, {}, Kernel.SM90_MX_LARGE_M),
        (SLAB, {"expected_m": 73}, Kernel.SM90_MX_LARGE_M),
        (SLAB, {"expected_m": 72}, Kernel.SM90_MX_MEDIUM_M),
        (SLAB, {"expected_m": 15}, Kernel.SM90_MX_MEDIUM_M),
        (SLAB, {"expected_m": 14}, Kernel.SM90_MX_SMALL_M),
        (SLAB, {"expected_m": 14, "experts": 1024}, Kernel.SM90_MX_SMALL_M),
        (SLAB, {"expected_m": 14, "experts": 1025}, Kernel.SM90_MX_MEDIUM_M),
        (SLAB, {"expected_m": 14, "n": 252}, Kernel.SM90_MX_SMALL_M),
        (SLAB, {"expected_m": 15, "n": 252}, Kernel.TRITON),
        (SLAB, {"n": 252}, Kernel.TRITON),
        (SLAB, {"n": 264}, Kernel.SM90_MX_LARGE_M),
        (SLAB, {"m": 256, "experts": 2048}, Kernel.SM90_MX_LARGE_M),
        (SLAB, {"m": 256, "experts": 2049}, Kernel.SM90_MX_LARGE_M),
        # 2^22 rows of 1024 columns are 8 GiB.
        (SLAB, {"m": 2**22, "k": 1024}, Kernel.SM90_MX_LARGE_M),
        (SLAB, {"m": 2**22 + 128, "k": 1024}, Kernel.TRITON),
        # With one factor a step 2^22 rows of 2048 columns are 8.25 GiB, and 8 / 8.25 of them fit.
        (SLAB, {"m": 2**22 - 2**17 + 3968, "k": 2048, "expected_m": 72}, Kernel.SM90_MX_MEDIUM_M),
        (SLAB, {"m": 2**22 - 2**17 + 4096, "k": 2048, "expected_m": 72}, Kernel.TRITON),
        (SEGMENTS, {"m": 2**22, "k": 1024}, Kernel.SM90_MX_LARGE_M),
        (SEGMENTS, {"m": 2**22 + 128, "k": 1024}, Kernel.TRITON),
        (SLAB, {"k": 192}, Kernel.TRITON),
        (SLAB, {"n": 2**23, "k": 128}, Kernel.SM90_MX_LARGE_M),
        (SLAB, {"n": 2**23, "k": 256}, Kernel.TRITON),
        (SLAB, {"m": 0}, Kernel.NONE),
        (SLAB, {"experts": 0}, Kernel.NONE),
        (SEGMENTS, {}, Kernel.SM90_MX_LARGE_M),
        # 128 * more // 8 + 1 rows for `more` segments beyond an expert's first
        (SEGMENTS, {"m": 7 * 128}, Kernel.SM90_MX_SMALL_M),
        (SEGMENTS, {"m": 8 * 128}, Kernel.SM90_MX_MEDIUM_M),
        (SEGMENTS, {"m": 12 * 128}, Kernel.SM90_MX_MEDIUM_M),
        (SEGMENTS, {"m": 13 * 128}, Kernel.SM90_MX_LARGE_M),
        (SEGMENTS, {"m": 1000 * 128, "experts": 910}, Kernel.SM90_MX_SMALL_M),
        (SEGMENTS, {"m": 1025 * 128, "experts": 1020}, Kernel.SM90_MX_MEDIUM_M),
        (SEGMENTS, {"m": 23 * 128 + 4}, Kernel.TRITON),
        (SLAB, {"fp4": True}, Kernel.SM90_MX_LARGE_M),
        (SLAB, {"granularity_a": (1, 32)}, Kernel.SM90_MX_LARGE_M),
        (SLAB, {"granularity_a": (1, 32), "fp4": True}, Kernel.TRITON),  # which refuses it
        (DENSE, {}, Kernel.DEEP_GEMM),
        (BLOCKS, {}, Kernel.DEEP_GEMM),
        (BF16, {}, Kernel.DEEP_GEMM),
        (BF16, {"n": 0}, Kernel.NONE),
    ],
)
def test_who_multiplies(gemm, changes, kernel) -> None:
    changed = dataclasses.replace(gemm, **changes)
    plan = gemm_plan(changed, 90)
    assert plan.kernel == kernel
    assert bool(plan.workspace_bytes) == (kernel in CLUSTER)
    for arch in (100, 103, 120):
        other = gemm_plan(changed, arch)
        nothing = 0 in (changed.m, changed.n, changed.k, changed.experts)
        assert other.kernel == (Kernel.NONE if nothing else Kernel.DEEP_GEMM)
        assert not other.workspace_bytes
    assert gemm_plan(changed, "cpu").kernel in (Kernel.NONE, Kernel.CPU)


@pytest.mark.parametrize(
    ("rows", "fp4", "block_m"),
    [(4, False, 8), (5, False, 16), (6, True, 8), (7, True, 16), (15, False, 128), (73, True, 256)],
)
def test_rows_of_a_tile(rows, fp4, block_m) -> None:
    assert gemm_plan(dataclasses.replace(SLAB, expected_m=rows, fp4=fp4), 90).block_m == block_m


def test_bad_sizes_are_refused() -> None:
    for changes in ({"experts": -1}, {"m": -1}, {"n": 2**41}, {"k": -128}, {"expected_m": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} must"):
            gemm_plan(dataclasses.replace(SLAB, **changes), 90)


@pytest.mark.parametrize(
    ("experts", "m", "at_once"),
    [
        (8, 2**19, 8),
        (8, 2**19 + 128, 4),
        (9, 2**19, 5),
        (2, 2**22, 1),
        (2048, 8, 2048),
        (2049, 8, 1025),
    ],
)
def test_slabs_share_eight_gibibytes(experts, m, at_once) -> None:
    """2^22 rows of 1024 columns are 8 GiB; parts are of equal size."""
    gemm = dataclasses.replace(SLAB, experts=experts, m=m, k=1024)
    rows = at_once * -(-m // 128) * 128
    plan = gemm_plan(gemm, 90)
    assert plan.experts_per_launch == at_once and plan.m_blocks == rows // 128
    assert plan.rows_bytes == rows * 2048 <= 2**33
    assert plan.flags_bytes == aligned(rows // 128 * 16)
    assert plan.tiles_bytes == aligned((rows // 128 + 1) * 16)


@pytest.mark.parametrize(
    ("segments", "experts", "rows"),
    [
        (3, 8, 1),
        (8, 8, 15),
        (1, 1, 15),
        (9, 8, 17),
        (10, 8, 33),
        (11, 8, 49),
        (3, 1, 257),
    ],
)
def test_rows_that_segments_leave_to_an_expert(segments, experts, rows) -> None:
    gemm = dataclasses.replace(SEGMENTS, m=segments * 128, experts=experts)
    assert gemm_plan(gemm, 90).expected_rows == rows


# ---- what texts and sources say ----


def most_rows(kernel: Kernel) -> int:
    """The most expected rows with which a kernel runs."""
    rows = [dataclasses.replace(SLAB, expected_m=rows) for rows in range(1, 100)]
    return max(spec.expected_m for spec in rows if gemm_plan(spec, 90).kernel == kernel)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (dgmoe_ops.fused_moe.__doc__, "expected rows cross {} or {} and"),
        (ops_gemm.grouped_gemm_nt_f8f8bf16_masked.__doc__, "up to {}, up to {} and above"),
        (
            ops_gemm.grouped_gemm_nt_f8f8bf16_masked.__doc__,
            "more than {} expected rows they take a workspace of up to 9/8 of a byte a value of"
            " `a`, with more than {} of 2 bytes",
        ),
        (config.batch_invariant.__doc__, "up to {} expected rows an expert, up to {} and above"),
    ],
)
def test_the_rows_that_change_the_kernel_are_said_right(text, says) -> None:
    pattern = re.escape(says).replace(re.escape("{}"), r"(\d+)")
    found = re.findall(pattern, " ".join(text.split()))
    assert found == [
        (str(most_rows(Kernel.SM90_MX_SMALL_M)), str(most_rows(Kernel.SM90_MX_MEDIUM_M)))
    ]


def test_it_is_for_the_host_and_includes_neither_cuda_nor_torch() -> None:
    source = HEADER.read_text()
    assert set(re.findall(r"#include ([<\"].*[>\"])", source)) == {
        "<algorithm>",
        "<cstdint>",
        '"../common/layout.h"',
    }


def test_the_two_sides_number_alike() -> None:
    body = re.search(r"enum class GemmKernel : int64_t {(.*?)};", HEADER.read_text(), re.S)[1]
    names = re.findall(r"^  k(\w+),", body, re.MULTILINE)
    assert names == ["".join(x.capitalize() for x in k.name.split("_")) for k in Kernel]


def test_nobody_else_knows_the_thresholds() -> None:
    """The one place that says which kernel runs."""
    root = HEADER.parents[2]
    for name in ("kSmallMMaxRows", "kMediumMMaxRows"):
        found = [p for p in (root / "csrc").rglob("*") if p.is_file() and name in p.read_text()]
        assert found == [HEADER]


# ---- for callers of the ops ----


def test_the_bytes_of_a_workspace() -> None:
    ask = dgmoe_ops.ops.grouped_gemm_workspace_bytes
    mx = {"recipe_a": (1, 32), "recipe_b": (1, 32)}
    assert ask("masked", 8, 1024, 256, 256, expected_m=256, **mx, arch=90) == 8 * 1024 * 512 + 2176
    assert ask(Layout.CONTIG, 8, 23 * 128, 256, 256, fp4=True, arch=90) == 1507328 + 768
    assert ask("masked", 8, 1024, 256, 256, expected_m=14, **mx, arch=90) == 0
    assert ask("masked", 8, 1024, 256, 256, expected_m=256, arch=90) == 0  # DeepGEMM's
    assert ask("masked", 8, 1024, 256, 256, expected_m=256, **mx, arch="cpu") == 0
    assert ask("contig", 0, 0, 0, 0, **mx, arch=90) == 0
    for arguments, arg in (
        ({"layout": "dense"}, "layout"),
        ({"m": -1}, "m"),
        ({"expected_m": None}, "expected_m"),
        ({"recipe_a": (1, 32)}, "recipe_a"),
    ):
        facts = {"layout": "masked", "experts": 8, "m": 256, "n": 8, "k": 128, "expected_m": 1}
        match = f"dgmoe_ops.grouped_gemm_workspace_bytes: {arg} must"
        with pytest.raises(ValueError, match=match):
            ask(**(facts | arguments))
