"""The table of what runs where: every cell, written out, and errors that name what would work."""

from __future__ import annotations

import dataclasses

import pytest
from deep_gemm_stand_in import mx_request, request

from dgmoe_ops import recipes
from dgmoe_ops.backends import platforms
from dgmoe_ops.backends.deep_gemm import rules
from dgmoe_ops.formats.layouts import Layout, ScaleLayout
from dgmoe_ops.weights import prepare

BOTH = {"masked", "contig"}
#: (arch, recipe, scale form) -> layouts; what is not here is illegal everywhere.
LEGAL = {
    ("cpu", "bf16", "none"): BOTH,
    ("cpu", "fp8_block", "block_fp32"): BOTH,
    ("cpu", "fp8_block", "packed_ue8m0"): BOTH,
    ("cpu", "mxfp8", "packed_ue8m0"): BOTH,
    ("cpu", "mxfp4", "packed_ue8m0"): BOTH,
    (90, "bf16", "none"): BOTH,
    (90, "fp8_block", "block_fp32"): BOTH,
    (90, "mxfp8", "packed_ue8m0"): BOTH,
    (90, "mxfp4", "packed_ue8m0"): BOTH,
    (100, "bf16", "none"): BOTH,
    (100, "fp8_block", "packed_ue8m0"): BOTH,
    (100, "mxfp8", "packed_ue8m0"): BOTH,
    (100, "mxfp4", "packed_ue8m0"): BOTH,
    (103, "bf16", "none"): BOTH,
    (103, "fp8_block", "packed_ue8m0"): BOTH,
    (103, "mxfp8", "packed_ue8m0"): BOTH,
    (103, "mxfp4", "packed_ue8m0"): BOTH,
    (120, "bf16", "none"): {"contig"},
    (120, "fp8_block", "packed_ue8m0"): {"contig"},
    (120, "mxfp4", "packed_ue8m0"): {"contig"},
    (121, "bf16", "none"): {"contig"},
    (121, "fp8_block", "packed_ue8m0"): {"contig"},
    (121, "mxfp4", "packed_ue8m0"): {"contig"},
}
ARCHS = ("cpu", 70, 80, 89, 90, 100, 103, 110, 120, 121, 130)


@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("cell", list(platforms.all_cells()), ids=lambda cell: "-".join(cell))
def test_every_cell(arch: int | str, cell: platforms.Cell) -> None:
    legal = cell.layout in LEGAL.get((arch, cell.recipe, cell.scale_layout), ())
    assert platforms.is_legal(arch, *cell) == legal
    if legal:
        platforms.check(arch, *cell)
        return
    with pytest.raises(ValueError) as refused:
        platforms.check(arch, *cell)
    message = str(refused.value)
    named = [name for name in (cell.recipe, platforms.arch_name(arch)) if name not in message]
    platform = platforms.platform_of(arch)
    assert not named or platform.name in message, message
    assert " runs " in message


def test_the_names_are_the_packages_own() -> None:
    assert set(platforms.RECIPES) == set(recipes.RECIPES)
    targets = {p.target for p in platforms.PLATFORMS if p.target}
    assert targets == set(prepare.TARGETS)
    for recipe in recipes.RECIPES.values():
        forms = {c.scale_layout for c in platforms.all_cells() if c.recipe == recipe.name}
        used = {
            f for p in platforms.PLATFORMS for f in platforms.scale_layouts(p.archs[0], recipe.name)
        }
        assert used <= forms and ("none" not in used) == recipe.quantized


@pytest.mark.parametrize("platform", platforms.PLATFORMS, ids=lambda platform: platform.name)
def test_the_table_is_frozen(platform: platforms.Platform) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        platform.cells = frozenset()
    assert isinstance(platform.cells, frozenset)


def test_every_cell_has_one_backend() -> None:
    for platform in platforms.PLATFORMS:
        for cell in platforms.all_cells():
            found = [b.name for b in platform.backends if cell in b.cells]
            assert len(found) == (cell in platform.cells)
            assert platforms.backend_of(platform.archs[0], *cell) == (found[0] if found else None)
    assert platforms.backend_of(90, "mxfp8", "masked", "packed_ue8m0") == "dgmoe_ops"
    rests = {(p.name, b.name): b.rest for p in platforms.PLATFORMS for b in p.backends if b.rest}
    assert rests == {("SM90", "dgmoe_ops"): "Triton"}
    assert platforms.backend_of(90, "fp8_block", "masked", "block_fp32") == "DeepGEMM"
    assert platforms.backend_of(80, "bf16", "masked", "none") is None


@pytest.mark.parametrize(
    ("wanted", "would_work"),
    [
        ((90, "fp8_block", "masked", "packed_ue8m0"), "masked with weight scales block_fp32"),
        ((100, "fp8_block", "contig", "block_fp32"), "contig with weight scales packed_ue8m0"),
        ((103, "bf16", "masked", "block_fp32"), "masked with weight scales none"),
        ((120, "fp8_block", "masked", "packed_ue8m0"), "contig with weight scales packed_ue8m0"),
        ((121, "bf16", "masked", "none"), 'target="sm120"'),
        (("cpu", "fp8_block", "masked", "none"), "block_fp32 or packed_ue8m0"),
        ((90, "mxfp4", "contig", "block_fp32"), "contig with weight scales packed_ue8m0"),
        ((120, "mxfp4", "masked", "packed_ue8m0"), "contig with weight scales packed_ue8m0"),
        ((120, "mxfp8", "contig", "packed_ue8m0"), "mxfp8 runs on CPU, SM90, SM100/103; bf16, "),
        ((110, "bf16", "contig", "none"), "bf16 runs on CPU, SM90, SM100/103, SM120/121"),
        ((80, "fp8_block", "contig", "block_fp32"), "got SM80; fp8_block runs on CPU, SM90"),
    ],
)
def test_errors_name_what_would_work(wanted: tuple, would_work: str) -> None:
    with pytest.raises(ValueError) as refused:
        platforms.check(*wanted)
    assert would_work in str(refused.value)


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if isinstance(arch, int)])
def test_what_an_error_offers_is_legal(arch: int) -> None:
    for recipe in platforms.RECIPES:
        for form in platforms.scale_layouts(arch, recipe):
            assert any(
                platforms.is_legal(arch, recipe, layout, form)
                for layout in platforms.layouts_of(arch, recipe)
            )


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (("fp6", "masked", "none"), "recipe must be one of bf16, fp8_block, mxfp4, mxfp8, got"),
        (("bf16", "auto", "none"), "layout must be one of masked, contig, got 'auto'"),
        (("bf16", "masked", "fp32"), "scale_layout must be one of none, block_fp32, packed_ue8m0"),
    ],
)
def test_unknown_names_are_refused(cell: tuple, said: str) -> None:
    with pytest.raises(ValueError, match="dgmoe_ops.platforms") as refused:
        platforms.check("cpu", *cell)
    assert said in str(refused.value)


@pytest.mark.parametrize("arch", [90, 100, 103, 110, 120, 121])
def test_the_backend_takes_what_the_table_calls_legal(arch: int) -> None:
    """Layout by layout and form by form, DeepGEMM's rules say the same as the table."""
    forms = {"block_fp32": ScaleLayout.MN_MAJOR, "packed_ue8m0": ScaleLayout.PACKED_UE8M0}
    for layout in Layout:
        for name, form in forms.items():
            made = request(f"grouped_gemm_nt_f8f8bf16_{layout}", form)
            if platforms.is_legal(arch, "fp8_block", layout, name):
                rules.check_scales(made, arch // 10)
            else:
                with pytest.raises(ValueError, match="SM"):
                    rules.check_scales(made, arch // 10)
        for recipe in ("mxfp8", "mxfp4"):
            made = mx_request(f"grouped_gemm_nt_f8f8bf16_{layout}", recipe)
            cell = (arch, recipe, layout, "packed_ue8m0")
            if platforms.backend_of(*cell) == "DeepGEMM":
                rules.check_scales(made, arch // 10)
            elif recipe == "mxfp4" or arch // 10 != 12:
                with pytest.raises(ValueError, match="SM"):
                    rules.check_scales(made, arch // 10)
