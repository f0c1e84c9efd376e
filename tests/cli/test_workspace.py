"""What our grouped GEMMs with MX weights on SM90 allocate: by hand, at the edges of the rule, and
its numbers against those of the sources."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

pytest.importorskip("click")  # the formulas belong to the command line

import dgmoe_ops  # noqa: E402
from dgmoe_ops import config  # noqa: E402
from dgmoe_ops.analysis import memory, workspace  # noqa: E402
from dgmoe_ops.analysis.workspace import MxGemm  # noqa: E402
from dgmoe_ops.formats.layouts import Layout  # noqa: E402
from dgmoe_ops.formats.recipes import RECIPES  # noqa: E402
from dgmoe_ops.ops import gemm as ops_gemm  # noqa: E402

ROOT = Path(__file__).parents[2]
GEMM = ROOT / "csrc" / "gemm" / "sm90"
SLAB = MxGemm(masked=True, experts=8, m=1024, n=256, k=256, expected_m=256, group_size=128)
SEGMENTS = dataclasses.replace(SLAB, masked=False, m=23 * 128, expected_m=1)


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
    slabs = {"flags": 8 * 8 * 16, "tiles": 8 * 8 * 16 + 16}
    assert scratch["masked"][1] == {"bf16 rows": 8 * 1024 * 256 * 2, **slabs}
    assert scratch["masked"][3] == {"bf16 rows": 8 * 1024 * 128 * 2, **slabs}
    assert scratch["contig"][1] == {"bf16 rows": 1507328, "flags": 368, "tiles": 384}
    assert scratch["contig"][3] == {"bf16 rows": 753664, "flags": 368, "tiles": 384}
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
    slabs, segments = {"tiles": 8 * 2 * 16 + 16}, {"tiles": 11 * 16 + 16}
    assert scratch["masked"][1] == {"prepared rows": 8 * 256 * row, **slabs}
    assert scratch["masked"][3] == {"prepared rows": 8 * 256 * row // 2, **slabs}
    assert scratch["contig"][1] == {"prepared rows": 11 * 128 * row, **segments}
    assert scratch["contig"][3] == {"prepared rows": 11 * 128 * row // 2, **segments}


def test_it_lives_with_the_input_and_the_output_of_its_gemm() -> None:
    stages = memory.stages(call_of(1024, "mxfp4"), Layout.MASKED)
    rows, kept = 8 * 1024, 8 * 4 + 1024 * 2 * 4  # masked_m, src2dst
    # mxfp4's activations: a byte a value, a word of scales for up to 512 columns
    x, act = rows * (256 + 4), rows * (128 + 4)
    gate_up, y = rows * 256 * 2, rows * 256 * 2
    assert stages[1].live == x + kept + gate_up + rows * 256 * 2 + 1024 + 1040
    assert stages[2].live == kept + gate_up + act
    assert stages[3].live == kept + act + y + rows * 128 * 2 + 1024 + 1040
    assert memory.peak(call_of(1024, "mxfp4"), Layout.MASKED) == stages[1].live == 10528816


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
        "prepared rows": 2 * 256 * (256 + 8),
        "tiles": 5 * 16,
    }
    assert memory.stages(large, Layout.MASKED)[1].scratch == {
        "bf16 rows": 2 * 512 * 256 * 2,
        "flags": 2 * 4 * 16,
        "tiles": 9 * 16,
    }


@pytest.mark.parametrize(
    ("gemm", "changes", "kernel"),
    [
        (SLAB, {}, "sm90_mx_large_m"),
        (SLAB, {"expected_m": 73}, "sm90_mx_large_m"),
        (SLAB, {"expected_m": 72}, "sm90_mx_medium_m"),
        (SLAB, {"expected_m": 15}, "sm90_mx_medium_m"),
        (SLAB, {"expected_m": 14}, "sm90_mx_small_m"),
        (SLAB, {"expected_m": 14, "experts": 1024}, "sm90_mx_small_m"),
        (SLAB, {"expected_m": 14, "experts": 1025}, "sm90_mx_medium_m"),
        (SLAB, {"expected_m": 14, "n": 252}, "sm90_mx_small_m"),
        (SLAB, {"expected_m": 15, "n": 252}, "Triton"),
        (SLAB, {"n": 252}, "Triton"),
        (SLAB, {"n": 264}, "sm90_mx_large_m"),
        (SLAB, {"m": 256, "experts": 2048}, "sm90_mx_large_m"),
        (SLAB, {"m": 256, "experts": 2049}, "sm90_mx_large_m"),
        # 2^22 rows of 1024 columns are 8 GiB.
        (SLAB, {"m": 2**22, "k": 1024}, "sm90_mx_large_m"),
        (SLAB, {"m": 2**22 + 128, "k": 1024}, "Triton"),
        # With one factor a step 2^22 rows of 2048 columns are 8.25 GiB, and 8 / 8.25 of them fit.
        (SLAB, {"m": 2**22 - 2**17 + 3968, "k": 2048, "expected_m": 72}, "sm90_mx_medium_m"),
        (SLAB, {"m": 2**22 - 2**17 + 4096, "k": 2048, "expected_m": 72}, "Triton"),
        (SEGMENTS, {"m": 2**22, "k": 1024}, "sm90_mx_large_m"),
        (SEGMENTS, {"m": 2**22 + 128, "k": 1024}, "Triton"),
        (SLAB, {"k": 192}, "Triton"),
        (SLAB, {"n": 2**23, "k": 128}, "sm90_mx_large_m"),
        (SLAB, {"n": 2**23, "k": 256}, "Triton"),
        (SLAB, {"m": 0}, None),
        (SLAB, {"experts": 0}, None),
        (SEGMENTS, {}, "sm90_mx_large_m"),
        # 128 * more // 8 + 1 rows for `more` segments beyond an expert's first
        (SEGMENTS, {"m": 7 * 128}, "sm90_mx_small_m"),
        (SEGMENTS, {"m": 8 * 128}, "sm90_mx_medium_m"),
        (SEGMENTS, {"m": 12 * 128}, "sm90_mx_medium_m"),
        (SEGMENTS, {"m": 13 * 128}, "sm90_mx_large_m"),
        (SEGMENTS, {"m": 1000 * 128, "experts": 910}, "sm90_mx_small_m"),
        (SEGMENTS, {"m": 1025 * 128, "experts": 1020}, "sm90_mx_medium_m"),
        (SEGMENTS, {"m": 23 * 128 + 4}, "Triton"),
    ],
)
def test_who_multiplies(gemm, changes, kernel) -> None:
    changed = dataclasses.replace(gemm, **changes)
    assert changed.kernel == kernel
    assert bool(changed.workspace()) == (kernel in ("sm90_mx_medium_m", "sm90_mx_large_m"))


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
    assert gemm.workspace()["bf16 rows"] == rows * 2048 <= 2**33
    assert gemm.workspace()["flags"] == rows // 128 * 16


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
    assert gemm.expected_rows == rows


# ---- the sources ----


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("mx_grouped_gemm.cuh", "kSmallMMaxRows", workspace.SMALL_M_MAX_ROWS),
        ("mx_grouped_gemm.cuh", "kMediumMMaxRows", workspace.MEDIUM_M_MAX_ROWS),
        ("mx_small_m_scheduler.cuh", "kSmallMMaxSegments", workspace.SMALL_M_MAX_SEGMENTS),
        ("mx_small_m_scheduler.cuh", "kSmallMMaxExperts", workspace.SMALL_M_MAX_EXPERTS),
        ("mx_small_m_scheduler.cuh", "kSmallMBlockN", workspace.SMALL_M_BLOCK_N),
        ("mx_common.cuh", "kMxSegment", workspace.CONTIG_ALIGNMENT),
        ("scheduler.cuh", "kBlockM", workspace.TILE_ROWS),
        ("mx_launch.cuh", "kMaxExpertsPerLaunch", workspace.MAX_EXPERTS_PER_LAUNCH),
        ("scheduler.cuh", "kClusterN", workspace.CLUSTER_N),
        ("scheduler.cuh", "kSlicesPerBlockM", workspace.SLICES_PER_BLOCK_M),
        ("mx_medium_m_prepare.cuh", "kMediumMBlockK", workspace.MEDIUM_M_BLOCK_K),
    ],
)
def test_the_numbers_are_those_of_the_sources(file, name, value) -> None:
    source = (GEMM / file).read_text()
    (found,) = re.findall(rf"constexpr \w+ {name} = (\d+);", source)
    assert int(found) == value


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
    assert found == [(str(workspace.SMALL_M_MAX_ROWS), str(workspace.MEDIUM_M_MAX_ROWS))]


def test_the_allocations_are_those_of_the_source() -> None:
    source = (GEMM / "mx_launch.cuh").read_text()
    for text in (
        "kMaxWorkspaceBytes = int64_t{8} << 30;",
        "kMaxWorkspaceBytes / m_block_bytes, INT32_MAX / 2 / ceil_div(plan.n, kClusterN));",
        "ceil_div(batches, std::min(kMaxExpertsPerLaunch, max_m_blocks / batch_m_blocks));",
        "empty({m_blocks * m_block_bytes}, ScalarType::Byte, d)",
        "empty({m_blocks * m_block_flags}, ScalarType::Int, d)",
        "empty({(m_blocks + 1) * 4}, ScalarType::Int, d)",
    ):
        assert text in source
    assert len(re.findall(r"\bempty\(", source)) == 3
    for name in ("mx_small_m", "mx_medium_m", "mx_large_m"):
        assert not re.search(r"\bempty\(", (GEMM / f"{name}.cu").read_text())
    assert workspace.MAX_WORKSPACE_BYTES == 8 * 2**30
    large = (GEMM / "mx_large_m.cu").read_text()
    assert "run_cluster_kernels(plan, d, plan.k * kColumnBytes, kSlicesPerBlockM," in large
    assert (
        "kLargeMBlockBytes = kBlockM * kLargeMBlockK * 2;"
        in (GEMM / "mx_large_m_prepare.cuh").read_text()
    )
    medium = (GEMM / "mx_medium_m.cu").read_text()
    assert "run_cluster_kernels(plan, d, plan.k / kMediumMBlockK * step_bytes, 0," in medium
    assert (
        "return kMediumMBlockBytes + kBlockM * 4 * (gran_k32 ? 4 : 1);"
        in (GEMM / "mx_medium_m_prepare.cuh").read_text()
    )
