"""The plan of one call as a document of plain values: what `plan --json` writes and the tables
show."""

from __future__ import annotations

from dataclasses import asdict

from ..backends import platforms
from ..formats.layouts import (
    CONTIG_ALIGNMENT,
    TILE_ROWS,
    Layout,
    LayoutExplanation,
    explain_layout,
    round_up,
)
from . import memory, roofline
from .gpus import Gpu
from .memory import Call

GIB = 1 << 30


def padding(call: Call, layout: Layout, counts: list[int]) -> dict:
    """How much of a layout is padding for experts with these row counts.

    `tile_rows` are the rows of the tiles that hold a valid row: what a GEMM that skips empty tiles
    works on.
    """
    allocated, valid = call.rows(layout), sum(counts)
    return {
        "valid_rows": valid,
        "tile_rows": sum(round_up(count, TILE_ROWS) for count in counts),
        "padding_rows": allocated - valid,
        "padding_share": (allocated - valid) / allocated if allocated else 0.0,
    }


def _stage(stage: memory.Stage, moved: roofline.Work, gpu: Gpu | None, quantized: bool) -> dict:
    seconds = moved.seconds(gpu, quantized) if gpu else None
    return {
        "stage": stage.name,
        "tensors": {name: count for name, count in stage.tensors.items() if count},
        "scratch": {name: count for name, count in stage.scratch.items() if count},
        "allocated_bytes": sum(stage.tensors.values()) + sum(stage.scratch.values()),
        "live_bytes": stage.live,
        "moved_bytes": moved.moved,
        "flops": moved.flops,
        "seconds": seconds,
    }


def _layout(call: Call, layout: Layout, counts: list[int], gpu: Gpu | None) -> dict:
    quantized = call.recipe.quantized
    parts = zip(memory.stages(call, layout), roofline.work(call, layout, counts), strict=True)
    stages = [_stage(stage, moved, gpu, quantized) for stage, moved in parts]
    per_expert = (
        {"slab_rows_per_expert": call.gemm_rows(layout)}
        if layout.has_slabs
        else {"segment_alignment": CONTIG_ALIGNMENT}
    )
    return {
        **per_expert,
        "rows": call.rows(layout),
        "even_routing": padding(call, layout, counts),
        "stages": stages,
        "peak_bytes": memory.peak(call, layout),
        "moved_bytes": sum(stage["moved_bytes"] for stage in stages),
        "flops": sum(stage["flops"] for stage in stages),
        "seconds": sum(stage["seconds"] for stage in stages) if gpu else None,
    }


def _choice(explained: LayoutExplanation) -> dict:
    return {
        "layout": explained.layout.value,
        "decided_by": explained.decided_by,
        "chain": [link._asdict() for link in explained.links],
    }


def _legal(call: Call, layout: Layout) -> str | None:
    """None, or why the layout does not run where the call does."""
    try:
        form = call.recipe.scale_layout_name(call.packed)
        platforms.check(call.arch, call.recipe.name, layout, form)
    except ValueError as error:
        return str(error)
    return None


def build(
    call: Call, argument: str, gpu: Gpu | None, memory_bytes: int | None, even_counts: list[int]
) -> dict:
    """Build the plan of a call.

    Args:
        call: its sizes.
        argument: `layout=` of the call.
        gpu: what it runs on; None for a CPU, which has no times here.
        memory_bytes: of the device; None for a CPU.
        even_counts: rows of the local experts under even routing.

    Raises:
        ValueError: a `DGMOE_*` variable that the choice reads has no legal value.
    """
    facts = call.facts(argument, memory_bytes)
    explained = explain_layout(facts)
    w13, w2 = call.weight_bytes_per_expert()
    return {
        "call": {
            **{name: value for name, value in asdict(call).items() if name != "recipe"},
            "recipe": call.recipe.name,
            "padded_hidden": call.padded_hidden,
            "padded_intermediate": call.padded_inter,
        },
        "device": asdict(gpu) if gpu else {"name": "cpu"},
        "memory_bytes": memory_bytes,
        "choice": _choice(explained),
        "illegal": {layout.value: reason for layout in Layout if (reason := _legal(call, layout))},
        "slab_bytes": facts.slab_bytes,
        "budget_bytes": None if memory_bytes is None else facts.budget_bytes,
        "weight_bytes": call.local_experts * (w13 + w2),
        "layouts": {x.value: _layout(call, x, even_counts, gpu) for x in Layout},
        "floor_seconds": roofline.floor_seconds(call, even_counts, gpu) if gpu else None,
    }
