"""The layer table: our layouts, stage by stage, beside the peers, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.cases import MEMORY_LIMIT
from benchmarks.inputs import (
    LayerInputs,
    LayerWeights,
    layer_inputs,
    weights_of,
)
from benchmarks.layers import (
    STAGES,
    Staged,
    fused,
    reference,
    relative_error,
    run_until,
    staged,
)
from benchmarks.report import Report, Row
from benchmarks.shapes import Shape, routing_floor_us
from benchmarks.timing import eager_us, graph_us, release
from dgmoe_ops.analysis.gpus import Gpu, gpu_of
from dgmoe_ops.formats.layouts import slab_rows

COLUMNS = (
    *("shape", "T", "recipe", "layer", "layout", *STAGES, "total us", "floor us", "of floor"),
    *("eager us", "error", "note"),
)
#: Largest relative error against the float64 reference, and between two implementations.
TOLERANCE = {"fp8_block": 4e-2, "bf16": 1e-2, "mxfp8": 4e-2, "mxfp4": 4e-2}
_FOOTNOTES = (
    "total: microseconds of one call under a CUDA graph, median of 7 replays of a graph whose"
    " calls work on different inputs. Stages: differences of the same measurement for growing"
    " prefixes of the layer, so they need not add up to the total of the fused op. Eager: host"
    " clock, launches included. On a CPU all are `torch.utils.benchmark` medians.",
    "floor: the larger of weight bytes of the experts that have rows over the memory rate, and"
    " operations over the peak rate.",
    "error: relative Frobenius error of two tokens against a float64 reference that rounds"
    " activations where the recipe does; the error against one that never rounds is in the JSON.",
)


@dataclass(frozen=True)
class Options:
    recipes: tuple[str, ...] = ("fp8_block",)
    stages: bool = True
    peers: bool = True


@dataclass(frozen=True)
class Contender:
    """One row of the table: who computes, and how to run it whole and, where possible, stage by
    stage.
    """

    layer: str
    layout: str
    whole: Callable[[LayerInputs, LayerWeights], torch.Tensor]
    steps: Staged | None = None
    note: str | None = None


def slab_bytes(shape: Shape, tokens: int, recipe: str) -> int:
    """Compute the most bytes that the masked layout holds at a time: a stage's input and its
    output.
    """
    size = 2 if recipe == "bf16" else 1
    hidden, inter = shape.hidden, shape.intermediate
    per_row = max(
        hidden * size + 4 * inter,
        4 * inter + inter * size,
        inter * size + 2 * hidden,
    )
    return shape.experts * slab_rows(tokens) * per_row


def contenders(shape: Shape, tokens: int, recipe: str, peer, device_name: str) -> list[Contender]:
    """List who can run: ours, then sglang's DeepGEMM layers and its Triton layer as shipped."""
    ours = [
        Contender("dgmoe", layout, partial(fused, layout), staged(layout))
        for layout in ("masked", "contig")
    ]
    ours.append(Contender("dgmoe", "auto", partial(fused, "auto")))
    if peer is None or recipe != "fp8_block":
        return ours
    steps = {"masked": peer.masked, "contig": peer.contig}
    config = peer.shipped_config(shape, tokens, device_name)
    steps["triton as shipped"] = partial(peer.triton, config=config)
    peers = [
        Contender("sglang", layout, partial(run_until, layer, "post"), layer)
        for layout, layer in steps.items()
    ]
    return ours + peers


class Cell:
    """One shape, token count and recipe: its inputs, its reference, and what ran on them."""

    def __init__(self, shape: Shape, tokens: int, weights: LayerWeights, gpu: Gpu | None):
        self.shape, self.tokens, self.weights = shape, tokens, weights
        self.device = weights.w2.device
        # Small calls find their weights in the L2 cache unless each routes differently.
        count = 2 if self.device.type == "cpu" else 8 if tokens <= 512 else 4
        self.inputs = [layer_inputs(shape, tokens, self.device, seed) for seed in range(count)]
        self.checked = sorted({0, tokens - 1})
        self.want = reference(self.inputs[0], weights, self.checked, True)
        self.unrounded = reference(self.inputs[0], weights, self.checked, False)
        self.floor = None
        if gpu is not None:
            floors = [routing_floor_us(shape, i.topk_ids, gpu, weights.recipe) for i in self.inputs]
            self.floor = sum(floors) / count
        self.outputs: dict[tuple[str, str], torch.Tensor] = {}

    def row(self, who: Contender) -> Row:
        row: Row = {"shape": self.shape.name, "T": self.tokens, "recipe": self.weights.recipe}
        row |= {"layer": who.layer, "layout": who.layout, "floor us": self.floor}
        if who.note:
            row["note"] = who.note
        return row

    def calls(self, run: Callable) -> list[Callable[[], object]]:
        return [partial(run, inputs, self.weights) for inputs in self.inputs]

    def check(self, who: Contender, row: Row) -> bool:
        """Compare one output with the reference and keep it for the comparison with the peer."""
        out = who.whole(self.inputs[0], self.weights)
        row["error"] = relative_error(out[self.checked], self.want)
        row["error_unrounded"] = relative_error(out[self.checked], self.unrounded)
        right = bool(row["error"] < TOLERANCE[self.weights.recipe])
        if right:  # a peer that is wrong says nothing about us
            self.outputs[who.layer, who.layout] = out
        return right

    def measure(self, who: Contender, row: Row, stages: bool) -> None:
        total = graph_us(self.calls(who.whole), self.device)
        row["total us"] = total
        row["of floor"] = total / self.floor if self.floor else None
        if stages and who.steps is not None:
            before = 0.0
            for stage in STAGES:
                until = graph_us(self.calls(partial(run_until, who.steps, stage)), self.device)
                row[stage] = until - before
                before = until
        row["eager us"] = eager_us(self.calls(who.whole), self.device)


def best_triton(cell: Cell, peer, shipped: Row) -> Contender:
    """Sweep a few configurations; the fastest, the shipped one included, becomes a contender."""
    name = torch.cuda.get_device_name(cell.device)
    best = peer.shipped_config(cell.shape, cell.tokens, name)
    best_us = float(shipped["total us"])
    for config in peer.sweep(cell.tokens):
        layer = partial(peer.triton, config=config)
        try:
            us = graph_us(cell.calls(partial(run_until, layer, "post")), cell.device, repeats=3)
        except Exception:  # noqa: BLE001  (a tile that does not fit this GPU is no candidate)
            continue
        if us < best_us:
            best, best_us = config, us
    layer = partial(peer.triton, config=best)
    note = " ".join(f"{key}={value}" for key, value in best.items())
    return Contender("sglang", "triton best", partial(run_until, layer, "post"), layer, note)


def _between(cell: Cell) -> list[tuple[str, float]]:
    """Compare our outputs with the peer's, over all tokens."""
    peers = {layout: out for (layer, layout), out in cell.outputs.items() if layer == "sglang"}
    return [
        (f"{mine} vs {theirs}", relative_error(out, peers[theirs]))
        for (layer, mine), out in cell.outputs.items()
        if layer == "dgmoe"
        for theirs in peers
    ]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"failed: {lines[0][:160]}"


class Run:
    """The loop over shapes, recipes and token counts, and what it writes."""

    def __init__(self, report: Report, options: Options, budget, say: Callable[[str], None]):
        self.report, self.options, self.budget, self.say = report, options, budget, say
        self.right = True
        self.peer = None

    def find_peer(self, device: torch.device) -> None:
        if not self.options.peers or device.type != "cuda":
            self.report.note("peers were not asked for, or do not run on this device")
            return
        try:
            from benchmarks.peers import sglang

            self.peer = sglang.load()
        except Exception as error:  # noqa: BLE001  (a foreign package may fail in any way)
            self.report.note(f"peer sglang is absent: {_first_line(error)}")

    def judge(self, row: Row, right: bool) -> None:
        if not right:
            row["note"] = "wrong result, not timed"
            self.right = self.right and row["layer"] != "dgmoe"

    def contend(self, cell: Cell, who: Contender) -> Row:
        """Check, then time, one contender; whatever happens, its row is written."""
        row = cell.row(who)
        needs_slab = who.layout == "masked"
        if self.budget.spent():
            row["note"] = "skipped: out of time"
        elif needs_slab and slab_bytes(cell.shape, cell.tokens, cell.weights.recipe) > MEMORY_LIMIT:
            row["note"] = "skipped: the slab is too large"
        else:
            try:
                right = cell.check(who, row)
                self.judge(row, right)
                if right:
                    cell.measure(who, row, self.options.stages)
            except Exception as error:  # noqa: BLE001  (one contender must not end the table)
                row["note"] = _first_line(error)
                self.right = self.right and who.layer != "dgmoe"
        self.report.add(row)
        release(cell.device)
        shown = {key: row.get(key) for key in ("total us", "of floor", "error", "note")}
        self.say(
            f"{cell.shape.name} T={cell.tokens} {cell.weights.recipe} {who.layer} {who.layout}: "
            + " ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                for key, value in shown.items()
                if value is not None
            )
        )
        return row

    def cell(self, shape: Shape, tokens: int, weights: LayerWeights, gpu: Gpu | None) -> None:
        if self.budget.spent():
            self.report.note(f"out of time before {shape.name} T={tokens} {weights.recipe}")
            return
        cell = Cell(shape, tokens, weights, gpu)
        name = torch.cuda.get_device_name(cell.device) if cell.device.type == "cuda" else "cpu"
        for who in contenders(shape, tokens, weights.recipe, self.peer, name):
            row = self.contend(cell, who)
            if who.layout == "triton as shipped" and "total us" in row and not self.budget.spent():
                self.contend(cell, best_triton(cell, self.peer, row))
        between = _between(cell)
        # Not `>=`: a NaN is a difference too.
        wrong = [pair for pair, error in between if not error < TOLERANCE[weights.recipe]]
        if wrong:
            self.right = False
            self.report.note(f"{shape.name} T={tokens}: too far apart: {', '.join(wrong)}")
        for pair, error in between:
            self.say(f"{shape.name} T={tokens} {weights.recipe}: {pair}: {error:.2e}")


def run(
    report: Report,
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    device: torch.device,
    options: Options,
    budget,
    say: Callable[[str], None],
) -> bool:
    """Fill the report; returns whether every result of ours was right."""
    report.notes.extend(_FOOTNOTES)
    state = Run(report, options, budget, say)
    state.find_peer(device)
    gpu = gpu_of(str(report.meta["device"]))
    for shape in shapes:
        for recipe in options.recipes:
            if budget.spent():
                report.note(f"out of time before {shape.name} {recipe}")
                continue
            weights = weights_of(recipe, shape, device)
            for count in tokens:
                state.cell(shape, count, weights, gpu)
            del weights
            release(device)
    return state.right
