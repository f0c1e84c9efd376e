"""Draw warp roles and pipeline stages of the SM90 MX kernels: `python -m docs.scripts.draw_sm90`.

Writes docs/images/sm90_kernels.svg. Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.patches import FancyArrowPatch, Rectangle  # noqa: E402

TARGET = Path(__file__).parents[1] / "images" / "sm90_kernels.svg"
COPY, PREPARE, MULTIPLY, SCALE, STORE = "#9ecae1", "#c7e9c0", "#fdae6b", "#fdd0a2", "#bcbddc"
EDGE = "#333333"


def box(axes, x, y, width, text, colour, height=0.8, size=7.5):
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=colour, edgecolor=EDGE, linewidth=0.7)
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def arrow(axes, start, end, colour=EDGE, style="-|>"):
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle=style, mutation_scale=8, linewidth=0.9, color=colour, shrinkA=0,
            shrinkB=0,
        )
    )  # fmt: skip


def lane(axes, y, name):
    axes.text(-0.25, y + 0.4, name, ha="right", va="center", fontsize=7.5)
    axes.axhline(y - 0.1, color="#dddddd", linewidth=0.6, zorder=0)


def frame(axes, title, width, height):
    axes.set_xlim(-4.4, width)
    axes.set_ylim(-0.9, height)
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
    axes.axis("off")


def small_m(axes) -> None:
    """One warpgroup does everything; three or four stages by cp.async."""
    frame(axes, "sm90_mx_small_m: one warpgroup a CTA, four CTAs a multiprocessor", 16.2, 4.2)
    lane(axes, 3, "all 4 warps:\ncp.async into a stage")
    lane(axes, 2, "scales to fp32 factors,\nFP4: columns of a permuted")
    lane(axes, 1, "wgmma m64n8k32 or m64n16k32")
    lane(axes, 0, "scale the product,\nadd in fp32")
    for step in range(4):
        x = step * 3.4
        box(axes, x, 3, 1.5, f"stage {step + 3}", COPY)
        box(axes, x + 0.8, 2, 1.5, f"stage {step + 1}", PREPARE)
        box(axes, x, 1, 2.3, f"stage {step}", MULTIPLY)
        box(axes, x + 2.3, 0, 1.0, f"stage {step}", SCALE)
        arrow(axes, (x + 2.3, 1.15), (x + 2.6, 0.8))
        if step < 3:
            arrow(axes, (x + 2.3, 2.4), (x + 3.4, 1.6))
    box(axes, 13.7, 0, 2.2, "last step of k:\nround, store", STORE, size=7)
    steps = "time; a stage is a step of k: 256 columns of FP4, 128 of FP8"
    axes.text(0, -0.6, steps, fontsize=7.5)


def pipeline(axes, y, stages, label) -> None:
    """The stages of shared memory, as a ring."""
    width = 12.6 / stages
    for i in range(stages):
        box(axes, i * width, y, width, f"{label} {i}", "#f7f7f7", height=0.6, size=7)


def cluster_of_two(axes, title, stages, operand, product, after, prepared) -> None:
    """A producer warpgroup and two math warpgroups, in a cluster of two CTAs."""
    frame(axes, title, 16.2, 7.0)
    axes.text(-0.25, 6.3, "prepare kernel", ha="right", va="center", fontsize=7.5)
    box(axes, 0, 5.9, 12.6, prepared, PREPARE)
    lane(axes, 4.7, "producer warps 8, 9:\nweights of this CTA")
    lands = "arrives on the stage's full mbarrier when it lands"
    box(axes, 0, 4.7, 12.6, f"cp.async, 16 bytes a thread; {lands}", COPY)
    lane(axes, 3.8, "producer warp 10,\none thread: rows of a")
    both = "multicast to both CTAs; completes on both full mbarriers"
    box(axes, 0, 3.8, 12.6, f"bulk copy of one half of the rows, {both}", COPY)
    axes.text(-0.25, 2.95, "stages in\nshared memory", ha="right", va="center", fontsize=7.5)
    pipeline(axes, 2.65, stages, "stage" if stages < 8 else "st.")
    lane(axes, 1.3, "math warpgroup 0:\nweight rows 0 to 63")
    lane(axes, 0.4, "math warpgroup 1:\nweight rows 64 to 127")
    for y in (1.3, 0.4):
        box(axes, 0, y, 2.6, operand, PREPARE, size=6.5)
        box(axes, 2.6, y, 4.2, product, MULTIPLY, size=6.5)
        box(axes, 6.8, y, 3.4, after, SCALE, size=7)
        box(axes, 10.2, y, 2.4, "per tile: round,\nstmatrix, store", STORE, size=7)
    arrow(axes, (0.5, 3.75), (0.5, 3.3))
    arrow(axes, (0.5, 2.62), (0.5, 2.15))
    axes.text(0.62, 2.35, "full", fontsize=7.5, va="center")
    arrow(axes, (9.6, 2.15), (9.6, 2.62), colour="#b2182b")
    arrow(axes, (9.6, 3.3), (9.6, 3.75), colour="#b2182b")
    axes.text(9.45, 2.35, "empty: mbarriers of both CTAs (rows),  named barrier (weights)",
              fontsize=7.5, va="center", ha="right", color="#b2182b")  # fmt: skip
    other = "the other CTA\nof the cluster:\nweight rows\n128 to 255,\nthe same rows\nof a"
    box(axes, 13.2, 0.4, 2.7, other, "#f7f7f7", height=5.1)
    arrow(axes, (12.6, 4.2), (13.2, 4.2), style="<|-|>")


def main() -> None:
    pyplot.rcParams["svg.hashsalt"] = "sm90"
    pyplot.rcParams["svg.fonttype"] = "none"
    pyplot.rcParams["font.family"] = "sans-serif"
    figure, (first, second, third) = pyplot.subplots(
        3, 1, figsize=(11.5, 12), gridspec_kw={"height_ratios": [5.1, 7.9, 7.9], "hspace": 0.12}
    )
    small_m(first)
    cluster_of_two(
        second,
        "sm90_mx_medium_m: cluster of two CTAs, steps of 128 columns, stages: 8 (FP4) or 6 (FP8)",
        8,
        "weights to registers,\nFP4 unpacked to e4m3",
        "wgmma m64nNk32, e4m3 by e4m3,\nseveral products under way",
        "each product times its\nscales, added in fp32",
        "rows of a in the order of the copies, their scales as fp32 factors; list of tiles",
    )
    cluster_of_two(
        third,
        "sm90_mx_large_m: cluster of two CTAs, steps of 64 columns, stages: 5",
        5,
        "weights to registers,\nbf16, times their scale",
        "wgmma m64nNk16, bf16 by bf16,\naccumulates over all of k",
        "nothing but one constant,\nat the end of the tile",
        "rows of a as bf16 with their scale folded in, in the order of the copies; list of tiles",
    )
    TARGET.parent.mkdir(exist_ok=True)
    figure.savefig(TARGET, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
