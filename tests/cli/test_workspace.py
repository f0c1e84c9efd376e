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
from dgmoe_ops.cli import memory, workspace  # noqa: E402
from dgmoe_ops.cli.workspace import MxGemm  # noqa: E402
from dgmoe_ops.ops import gemm as ops_gemm  # noqa: E402
from dgmoe_ops.recipes import RECIPES  # noqa: E402

ROOT = Path(__file__).parents[2]
GEMM = ROOT / "csrc" / "gemm"
README = (ROOT / "README.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
SLAB = MxGemm(masked=True, experts=8, m=1024, n=256, k=256, expected_m=256)
SEGMENTS = MxGemm(masked=False, experts=8, m=23 * 128, n=256, k=256, expected_m=1)


def call_of(tokens: int, recipe: str, arch: int | str = 90, local: int = 8) -> memory.Call:
    return memory.Call(tokens, 8, local, 256, 128, 2, RECIPES[recipe], packed=True, arch=arch)


# ---- by hand ----


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_many_rows_take_two_bytes_a_value_flags_and_tiles(recipe) -> None:
    """1024 tokens, two of eight experts each: 256 rows an expert, in slabs of 1024 rows or in 8 +
    (2048 - 8) // 128 = 23 segments."""
    scratch = {
        layout: [stage.scratch for stage in memory.stages(call_of(1024, recipe), layout)]
        for layout in ("masked", "contig")
    }
    # 8 slabs of 8 units, 256 and 128 columns; four int32 flags a unit; four int32 a tile, and
    # their number
    slabs = {"flags": 8 * 8 * 16, "tiles": 8 * 8 * 16 + 16}
    assert scratch["masked"][1] == {"bf16 rows": 8 * 1024 * 256 * 2, **slabs}
    assert scratch["masked"][3] == {"bf16 rows": 8 * 1024 * 128 * 2, **slabs}
    assert scratch["contig"][1] == {"bf16 rows": 1507328, "flags": 368, "tiles": 384}
    assert scratch["contig"][3] == {"bf16 rows": 753664, "flags": 368, "tiles": 384}
    assert not any(scratch[layout][i] for layout in scratch for i in (2, 4))


def test_it_lives_with_the_input_and_the_output_of_its_gemm() -> None:
    stages = memory.stages(call_of(1024, "mxfp4"), "masked")
    rows, kept = 8 * 1024, 8 * 4 + 1024 * 2 * 4  # masked_m, src2dst
    # mxfp4's activations: a byte a value, a word of scales for up to 512 columns
    x, act = rows * (256 + 4), rows * (128 + 4)
    gate_up, y = rows * 256 * 2, rows * 256 * 2
    assert stages[1].live == x + kept + gate_up + rows * 256 * 2 + 1024 + 1040
    assert stages[2].live == kept + gate_up + act
    assert stages[3].live == kept + act + y + rows * 128 * 2 + 1024 + 1040
    assert memory.peak(call_of(1024, "mxfp4"), "masked") == stages[1].live == 10528816


@pytest.mark.parametrize(
    ("recipe", "arch"), [("mxfp4", "cpu"), ("mxfp8", 100), ("fp8_block", 90), ("bf16", 90)]
)
def test_other_recipes_and_devices_have_none(recipe, arch) -> None:
    for layout in ("masked", "contig"):
        here = memory.stages(call_of(1024, recipe, arch), layout)
        assert here == memory.stages(call_of(1024, recipe, "cpu"), layout)
        assert not here[1].scratch and not here[3].scratch


# ---- who takes what ----


@pytest.mark.parametrize(
    ("tokens", "masked", "contig"),
    [
        (0, False, False),
        (1, False, False),
        (112, False, False),  # 28 rows an expert
        (113, True, False),  # 29; of a further segment for 8 experts: 17
        (131, True, False),  # (262 - 8) // 128 = 1
        (132, True, True),  # (264 - 8) // 128 = 2: 33
        (1024, True, True),
    ],
)
def test_few_rows_add_nothing(tokens, masked, contig) -> None:
    call = call_of(tokens, "mxfp8")
    for layout, many in (("masked", masked), ("contig", contig)):
        stages = memory.stages(call, layout)
        assert [bool(stages[i].scratch) for i in (1, 3)] == [many] * 2


def test_experts_of_other_ranks_share_the_rows() -> None:
    """The hint counts all experts, slabs those of this rank."""
    few, many = call_of(112, "mxfp4", local=2), call_of(113, "mxfp4", local=2)
    assert not memory.stages(few, "masked")[1].scratch
    assert memory.stages(many, "masked")[1].scratch == {
        "bf16 rows": 2 * 256 * 256 * 2,
        "flags": 2 * 2 * 16,
        "tiles": 5 * 16,
    }


@pytest.mark.parametrize(
    ("gemm", "changes", "kernel"),
    [
        (SLAB, {}, "many rows"),
        (SLAB, {"expected_m": 29}, "many rows"),
        (SLAB, {"expected_m": 28}, "few rows"),
        (SLAB, {"expected_m": 28, "experts": 1024}, "few rows"),
        (SLAB, {"expected_m": 28, "experts": 1025}, "many rows"),
        (SLAB, {"expected_m": 28, "n": 252}, "few rows"),
        (SLAB, {"n": 252}, "Triton"),
        (SLAB, {"n": 264}, "many rows"),
        (SLAB, {"m": 256, "experts": 2048}, "many rows"),
        (SLAB, {"m": 256, "experts": 2049}, "many rows"),
        # 2^22 rows of 1024 columns are 8 GiB.
        (SLAB, {"m": 2**22, "k": 1024}, "many rows"),
        (SLAB, {"m": 2**22 + 128, "k": 1024}, "Triton"),
        (SEGMENTS, {"m": 2**22, "k": 1024}, "many rows"),
        (SEGMENTS, {"m": 2**22 + 128, "k": 1024}, "Triton"),
        (SLAB, {"k": 192}, "Triton"),
        (SLAB, {"n": 2**23, "k": 128}, "many rows"),
        (SLAB, {"n": 2**23, "k": 256}, "Triton"),
        (SLAB, {"m": 0}, None),
        (SLAB, {"experts": 0}, None),
        (SEGMENTS, {}, "many rows"),
        # 128 * more // 8 + 1 rows for `more` segments beyond an expert's first
        (SEGMENTS, {"m": 9 * 128}, "few rows"),
        (SEGMENTS, {"m": 10 * 128}, "many rows"),
        (SEGMENTS, {"m": 1024 * 128, "experts": 900}, "few rows"),
        (SEGMENTS, {"m": 1025 * 128, "experts": 900}, "many rows"),
        (SEGMENTS, {"m": 23 * 128 + 4}, "Triton"),
    ],
)
def test_who_multiplies(gemm, changes, kernel) -> None:
    changed = dataclasses.replace(gemm, **changes)
    assert changed.kernel == kernel
    assert bool(changed.workspace()) == (kernel == "many rows")


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
        (8, 8, 9),
        (1, 1, 28),
        (2, 2, 28),
        (4, 4, 17),
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
        ("grouped_gemm_cuda.cuh", "kFewRowsMost", workspace.FEW_ROWS),
        ("few_rows_work.cuh", "kFewRowsItems", workspace.FEW_ITEMS),
        ("few_rows_work.cuh", "kFewRowsExperts", workspace.FEW_EXPERTS),
        ("few_rows_work.cuh", "kFewRowsWeights", workspace.FEW_WEIGHTS),
        ("few_rows_work.cuh", "kFewRowsSegment", workspace.CONTIG_ALIGNMENT),
        ("many_rows_work.cuh", "kManyRowsUnit", workspace.TILE_ROWS),
        ("many_rows_cuda.cu", "kMostExperts", workspace.MANY_EXPERTS),
        ("many_rows_work.cuh", "kManyRowsWeights", workspace.MANY_WEIGHTS),
        ("many_rows_work.cuh", "kManyRowsSlices", workspace.MANY_SLICES),
    ],
)
def test_the_numbers_are_those_of_the_sources(file, name, value) -> None:
    source = (GEMM / file).read_text()
    (found,) = re.findall(rf"constexpr \w+ {name} = (\d+);", source)
    assert int(found) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (README, "at most {} expected an expert"),
        (README, "expected rows of its call cross {}:"),
        (README, "change kernels at {} rows"),
        (CHANGELOG, "expected rows of an expert cross {}."),
        (dgmoe_ops.fused_moe.__doc__, "expected rows cross {} and"),
        (ops_gemm.grouped_gemm_nt_f8f8bf16_masked.__doc__, "up to {} and above"),
        (ops_gemm.grouped_gemm_nt_f8f8bf16_masked.__doc__, "more than {} expected rows"),
        (config.batch_invariant.__doc__, "up to {} expected rows"),
    ],
)
def test_the_rows_that_change_the_kernel_are_said_right(text, says) -> None:
    pattern = re.escape(says).replace(re.escape("{}"), r"(\d+)")
    found = re.findall(pattern, " ".join(text.split()))
    assert found == [str(workspace.FEW_ROWS)]


def test_the_allocations_are_those_of_the_source() -> None:
    source = (GEMM / "many_rows_cuda.cu").read_text()
    for text in (
        "kMostWideBytes = int64_t{8} << 30;",
        "unit_bytes = kManyRowsUnit * plan.k * 2;",
        "std::min(kMostWideBytes / unit_bytes,"
        " INT32_MAX / 2 / ceil_div(plan.n, kManyRowsWeights));",
        "ceil_div(batches, std::min(kMostExperts, most_units / batch_units));",
        "empty({units * unit_bytes}, ScalarType::Byte, d)",
        "empty({units * kManyRowsSlices}, ScalarType::Int, d)",
        "empty({(units + 1) * 4}, ScalarType::Int, d)",
    ):
        assert text in source
    assert len(re.findall(r"\bempty\(", source)) == 3
    assert not re.search(r"\bempty\(", (GEMM / "few_rows_cuda.cu").read_text())
    assert workspace.MANY_WIDE_BYTES == 8 * 2**30
