"""The two layouts drawn to scale: a column an expert, as high as its rows; equal areas are equal
rows."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch, Rectangle  # noqa: E402

from ..analysis.memory import Call  # noqa: E402
from ..formats.layouts import CONTIG_ALIGNMENT, Layout, ceil_div, round_up  # noqa: E402
from .text import share  # noqa: E402

_SHADES = ("#1f5a99", "#5b9bd5")  # neighbours differ
_PADDING = {"facecolor": "#f4efe6", "edgecolor": "#b9a888", "hatch": "////", "linewidth": 0.0}
_SURPLUS = {"facecolor": "#f3e3e3", "edgecolor": "#c08a8a", "hatch": "\\\\\\\\", "linewidth": 0.0}
_OUTLINED_EXPERTS = 64  #: with more, outlines would cover what they frame


def _columns(axes: Axes, heights: list[int], counts: list[int]) -> None:
    """Padding up to the height of each expert's rows, and its valid rows in front of it."""
    for expert, (height, count) in enumerate(zip(heights, counts, strict=True)):
        if height:
            axes.add_patch(Rectangle((expert, 0), 1, height, **_PADDING))
        if count:
            axes.add_patch(Rectangle((expert, 0), 1, count, color=_SHADES[expert % 2], linewidth=0))
        if height and len(counts) <= _OUTLINED_EXPERTS:
            axes.add_patch(
                Rectangle((expert, 0), 1, height, fill=False, edgecolor="#6b6250", linewidth=0.6)
            )


def _surplus(axes: Axes, start: float, rows: int, top: int) -> float:
    """Rows that no routing of this call fills, as a block of the same area; returns its end."""
    if not rows:
        return start
    # Never higher than the panel, at least a column wide.
    width = max(1, ceil_div(rows, top))
    end, height = start + width, rows / width
    axes.add_patch(Rectangle((start, 0), width, height, **_SURPLUS))
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2}
    axes.text(start + width / 2, height / 2, f"{rows:,} rows", ha="center", va="center", bbox=box)
    return end


def _label(axes: Axes, name: str, rows: int, valid: int) -> None:
    axes.set_title(
        f"{name}: {rows:,} rows, {valid:,} valid, {share(rows - valid, rows)} padding",
        loc="left",
        fontsize=12,
    )
    axes.set_ylabel("rows of the expert")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw(file: Path, call: Call, counts: list[int], title: str, source: str) -> None:
    """Draw both layouts of a call for experts with these row counts into this very file, whose
    suffix names the format; without one it is PNG.

    Both panels have one scale, so that their areas compare. In the contiguous layout the segments
    stand one behind the other in memory; here each is a column, and the rows behind the last one
    are a block of the same area.
    """
    experts, valid = call.local_experts, sum(counts)
    slab, rows = call.gemm_rows(Layout.MASKED), call.rows(Layout.CONTIG)
    segments = [round_up(count, CONTIG_ALIGNMENT) for count in counts]
    behind = rows - sum(segments)
    top = max(slab, *segments, 1)

    figure = Figure(figsize=(12, 8), layout="constrained")
    masked, contig = figure.subplots(2, 1, sharex=True, sharey=True)
    figure.suptitle(f"{title}\n{source}", fontsize=11)
    _columns(masked, [slab] * experts, counts)
    _label(masked, "masked slab", call.rows(Layout.MASKED), valid)
    _columns(contig, segments, counts)
    gap = max(0.3, experts / 40) if behind else 0
    end = _surplus(contig, experts + gap, behind, top)
    _label(contig, "contiguous segments", rows, valid)
    contig.set_xlabel("expert of this rank" + (", then the rows behind the last" if behind else ""))
    contig.set_xlim(-0.01 * end, 1.01 * end)
    contig.set_ylim(0, 1.02 * top)
    step = max(1, ceil_div(experts, 16))
    ticks = range(0, experts, step)
    contig.set_xticks([tick + 0.5 for tick in ticks], [str(tick) for tick in ticks])
    patches = [
        Patch(color=_SHADES[0], label="valid rows (shades alternate by expert)"),
        Patch(label="padding of an expert", **_PADDING),
        Patch(label="behind the last segment: for a worse routing", **_SURPLUS),
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    figure.savefig(file, dpi=130, format=file.suffix[1:] or "png")
