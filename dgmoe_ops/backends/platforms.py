"""What runs where: which recipe, layout and weight-scale form is legal on which architecture.

Plain data. An architecture is an int, compute capability major * 10 + minor (90, 103), or "cpu", so
every cell can be asked for on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..formats.layout import Layout

#: What the scales of the weights are: none (bf16), float32 128x128 blocks, packed UE8M0 a row.
SCALE_LAYOUTS = ("none", "block_fp32", "packed_ue8m0")


class Cell(NamedTuple):
    """One way to run the layer."""

    recipe: str
    layout: Layout
    scale_layout: str


@dataclass(frozen=True)
class Backend:
    """Who runs the grouped GEMMs of some cells.

    Attributes:
        name: for people to read.
        cells: what it runs.
        rest: who runs what its kernels do not take of these cells; None where they take all.
    """

    name: str
    cells: frozenset[Cell]
    rest: str | None = None


@dataclass(frozen=True)
class Platform:
    """A family of architectures that runs the same cells.

    Attributes:
        name: for people to read.
        archs: the architectures of the family.
        target: what `prepare_weights` calls it; None where nothing runs.
        backends: who runs what there; no cell has two.
    """

    name: str
    archs: tuple[int | str, ...]
    target: str | None
    backends: tuple[Backend, ...]

    @property
    def cells(self) -> frozenset[Cell]:
        """What is legal."""
        return frozenset().union(*(backend.cells for backend in self.backends))


def _cells(layouts: Iterable[Layout], *forms: tuple[str, str]) -> frozenset[Cell]:
    return frozenset(Cell(recipe, layout, form) for layout in layouts for recipe, form in forms)


_BF16 = ("bf16", "none")
_FP8_FP32 = ("fp8_block", "block_fp32")
_FP8_UE8M0 = ("fp8_block", "packed_ue8m0")
_MXFP8 = ("mxfp8", "packed_ue8m0")
_MXFP4 = ("mxfp4", "packed_ue8m0")

PLATFORMS: tuple[Platform, ...] = (
    Platform(
        "CPU",
        ("cpu",),
        "cpu",
        (Backend("dgmoe_ops", _cells(Layout, _BF16, _FP8_FP32, _FP8_UE8M0, _MXFP8, _MXFP4)),),
    ),
    # The library has no MX kernels for it. Ours take small, medium and large M. Only what
    # they do not take needs Triton: `csrc/gemm/heuristics.h` has the rule.
    Platform(
        "SM90",
        (90,),
        "sm90",
        (
            Backend("DeepGEMM", _cells(Layout, _BF16, _FP8_FP32)),
            Backend("dgmoe_ops", _cells(Layout, _MXFP8, _MXFP4), rest="Triton"),
        ),
    ),
    # The tensor core applies UE8M0 scales itself; the library would convert float32 ones on every
    # call, and only powers of two.
    Platform(
        "SM100/103",
        (100, 103),
        "sm100",
        (Backend("DeepGEMM", _cells(Layout, _BF16, _FP8_UE8M0, _MXFP8, _MXFP4)),),
    ),
    # The library takes the architecture for a Hopper and has no kernel for it.
    Platform("SM110", (110,), None, ()),
    # No masked kernels, and nobody has run MXFP8 experts there.
    Platform(
        "SM120/121",
        (120, 121),
        "sm120",
        (Backend("DeepGEMM", _cells((Layout.CONTIG,), _BF16, _FP8_UE8M0, _MXFP4)),),
    ),
)
RECIPES = tuple(sorted({cell.recipe for platform in PLATFORMS for cell in platform.cells}))
_BY_ARCH = {arch: platform for platform in PLATFORMS for arch in platform.archs}


def arch_name(arch: int | str) -> str:
    """Name an architecture for people to read: `SM90`, `CPU`."""
    return "CPU" if arch == "cpu" else f"SM{arch}"


def platform_of(arch: int | str) -> Platform | None:
    """Look up the platform of an architecture; None where the table has no row for it."""
    return _BY_ARCH.get(arch)


def all_cells() -> Iterator[Cell]:
    """Iterate over every combination that the table can be asked for, legal or not."""
    for recipe in RECIPES:
        for layout in Layout:
            for form in SCALE_LAYOUTS:
                yield Cell(recipe, layout, form)


def is_legal(arch: int | str, recipe: str, layout: str, scale_layout: str) -> bool:
    """Tell whether a cell is legal on an architecture."""
    platform = platform_of(arch)
    return platform is not None and Cell(recipe, layout, scale_layout) in platform.cells


def backend_of(arch: int | str, recipe: str, layout: str, scale_layout: str) -> str | None:
    """Name who runs a cell on an architecture; None where nobody does."""
    return _BACKENDS.get((arch, recipe, layout, scale_layout))


def scale_layouts(arch: int | str, recipe: str) -> tuple[str, ...]:
    """The weight-scale forms with which a recipe runs on an architecture in some layout, the one
    that `prepare_weights` makes there first."""
    platform = platform_of(arch)
    legal = {c.scale_layout for c in platform.cells if c.recipe == recipe} if platform else set()
    return tuple(form for form in SCALE_LAYOUTS if form in legal)


def layouts_of(arch: int | str, recipe: str) -> tuple[Layout, ...]:
    """The layouts in which a recipe runs on an architecture."""
    platform = platform_of(arch)
    legal = {c.layout for c in platform.cells if c.recipe == recipe} if platform else set()
    return tuple(layout for layout in Layout if layout in legal)


_BACKENDS = {
    (arch, *cell): backend.name
    for platform in PLATFORMS
    for arch in platform.archs
    for backend in platform.backends
    for cell in backend.cells
}
_LEGAL = {
    (arch, recipe, form): tuple(
        layout for layout in Layout if Cell(recipe, layout, form) in platform.cells
    )
    for platform in PLATFORMS
    for arch in platform.archs
    for recipe in RECIPES
    for form in SCALE_LAYOUTS
}


def legal_layouts(arch: int | str, recipe: str, scale_layout: str) -> tuple[Layout, ...]:
    """The layouts in which a recipe runs on an architecture with weight scales of a form."""
    return _LEGAL.get((arch, recipe, scale_layout), ())


def _known(arg: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(
            f"dgmoe_ops.platforms: {arg} must be one of {', '.join(known)}, got {value!r}"
        )


def runs_at(recipe: str) -> str:
    """Name the platforms that run a recipe, for people to read."""
    return ", ".join(p.name for p in PLATFORMS if any(c.recipe == recipe for c in p.cells))


def _what_would_work(platform: Platform, wanted: Cell) -> str:
    """The nearest legal cells: with other scales, else in another layout."""
    cells = [c for c in platform.cells if c.recipe == wanted.recipe]
    if not cells:
        there = [recipe for recipe in RECIPES if any(c.recipe == recipe for c in platform.cells)]
        return f"{wanted.recipe} runs on {runs_at(wanted.recipe)}; {', '.join(there)} run there"
    near = [c for c in cells if c.layout == wanted.layout] or cells
    # A layout that must change keeps the scales where it can.
    near = [c for c in near if c.scale_layout == wanted.scale_layout] or near
    layouts = [layout for layout in Layout if any(c.layout == layout for c in near)]
    forms = [form for form in SCALE_LAYOUTS if any(c.scale_layout == form for c in near)]
    return (
        f"{wanted.recipe} runs there in layout {' or '.join(layouts)} with weight scales"
        f' {" or ".join(forms)} (prepare_weights with target="{platform.target}")'
    )


def check(arch: int | str, recipe: str, layout: str, scale_layout: str) -> None:
    """Check that a recipe runs on an architecture in a layout, with weight scales of a form.

    Args:
        arch: compute capability major * 10 + minor, or "cpu".
        recipe: "bf16", "fp8_block", "mxfp8" or "mxfp4".
        layout: "masked" or "contig".
        scale_layout: of the weights: "none", "block_fp32" or "packed_ue8m0".

    Raises:
        ValueError: it does not, or a name is unknown; the message says what would work.
    """
    _known("recipe", recipe, RECIPES)
    _known("layout", layout, [name.value for name in Layout])
    _known("scale_layout", scale_layout, SCALE_LAYOUTS)
    if is_legal(arch, recipe, layout, scale_layout):
        return
    platform = platform_of(arch)
    if platform is None or not platform.cells:
        raise ValueError(
            f"dgmoe_ops.platforms: arch must be one that grouped GEMMs exist for, got"
            f" {arch_name(arch)}; {recipe} runs on {runs_at(recipe)}"
        )
    work = _what_would_work(platform, Cell(recipe, layout, scale_layout))
    raise ValueError(
        f"dgmoe_ops.platforms: {platform.name} does not run recipe {recipe} in layout {layout} with"
        f" weight scales {scale_layout}; {work}"
    )
