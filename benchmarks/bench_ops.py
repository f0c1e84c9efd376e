"""The op table: one room after the other, every op at every shape and token count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks import (
    bench_activation,
    bench_combine,
    bench_gemm,
    bench_permute,
    bench_route,
    bench_scale,
    bench_weights,
)
from benchmarks.cases import Builder, TooLarge
from benchmarks.inputs import rotating
from benchmarks.report import Report, Row
from benchmarks.shapes import Shape
from benchmarks.timing import graph_us, release

ROOMS: dict[str, dict[str, Builder]] = {
    "scale": bench_scale.OPS,
    "route": bench_route.OPS,
    "permute": bench_permute.OPS,
    "gemm": bench_gemm.OPS,
    "activation": bench_activation.OPS,
    "combine": bench_combine.OPS,
    "weights": bench_weights.OPS,
}
COLUMNS = ("room", "op", "shape", "tokens", "us", "GB/s", "TFLOP/s", "of copy", "note")


def selected(rooms: Sequence[str], ops: Sequence[str]) -> Iterator[tuple[str, str, Builder]]:
    """Walk the ops of the named rooms, or of all rooms, that are among the named ops, or all."""
    for room, builders in ROOMS.items():
        if rooms and room not in rooms:
            continue
        for op, builder in builders.items():
            if not ops or op in ops:
                yield room, op, builder


def measure(builder: Builder, shape: Shape, tokens: int, device: torch.device, copy: float) -> Row:
    """Time one op on as many input sets as keep it out of the cache."""
    first = builder(shape, tokens, device, 0)
    sets = rotating(first.bytes, device)
    cases = [first, *(builder(shape, tokens, device, seed) for seed in range(1, sets))]
    us = graph_us([case.call for case in cases], device)
    moved = sum(case.bytes for case in cases) / sets
    flops = sum(case.flops for case in cases) / sets
    rate = moved / (us * 1e-6)
    return {
        "us": us,
        "bytes": moved,
        "flops": flops,
        "GB/s": rate * 1e-9,
        "TFLOP/s": flops / us * 1e-6 if flops else None,
        "of copy": rate / copy,
        "sets": sets,
    }


def run(
    report: Report,
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    device: torch.device,
    rooms: Sequence[str],
    ops: Sequence[str],
    copy: float,
    budget,
) -> None:
    """Fill the report; an op that cannot run here gets a row that says why."""
    for room, op, builder in selected(rooms, ops):
        for shape in shapes:
            for count in tokens:
                row: Row = {"room": room, "op": op, "shape": shape.name, "tokens": count}
                if budget.spent():
                    row["note"] = "skipped: out of time"
                else:
                    try:
                        row |= measure(builder, shape, count, device, copy)
                    except TooLarge:
                        row["note"] = "skipped: the slab is too large"
                    except Exception as error:  # noqa: BLE001  (one op must not end the table)
                        row["note"] = f"failed: {str(error).strip().splitlines()[0][:160]}"
                report.add(row)
        bench_gemm.forget_weights()
        release(device)
