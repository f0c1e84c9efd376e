"""`plan`: what one call of the layer takes, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..analysis import planning, routing
from ..analysis.gpus import GPUS
from ..analysis.memory import Call
from ..backends import platforms
from ..formats.layouts import LAYOUT_ARGUMENTS, Layout
from ..formats.recipes import RECIPES
from .options import MOST_TOKENS, Command, Finite, NamedPath, check_sizes, sizes
from .text import console, microseconds, share, size

MOST_DRAWN = 1 << 28  #: tokens times experts of a random routing: some seconds


def _title(document: dict) -> str:
    call, device = document["call"], document["device"]
    local = (
        ""
        if call["local_experts"] == call["experts"]
        else f" ({call['local_experts']} on this rank)"
    )
    return (
        f"{call['tokens']} tokens, {call['experts']} experts{local}, hidden {call['hidden']},"
        f" intermediate {call['intermediate']}, top-k {call['top_k']}, {call['recipe']},"
        f" {device['name']}"
    )


def _chain_table(document: dict) -> Table:
    choice = document["choice"]
    table = Table(
        title=f"Layout: {choice['layout']}, decided by {choice['decided_by']}", title_justify="left"
    )
    for column in ("link", "says", "decides"):
        table.add_column(column)
    for link in choice["chain"]:
        table.add_row(link["name"], escape(link["says"]), link["layout"] or "")
    return table


def _rows_table(document: dict) -> Table:
    table = Table(title="Rows, padding under even routing", title_justify="left")
    table.add_column("layout")
    columns = ("an expert", "allocated", "valid", "in tiles of 128 with valid rows", "padding")
    for column in columns:
        table.add_column(column, justify="right")
    for name, layout in document["layouts"].items():
        even = layout["even_routing"]
        rows = layout.get("slab_rows_per_expert")
        table.add_row(
            name,
            f"slab of {rows}" if rows is not None else f"multiple of {layout['segment_alignment']}",
            f"{layout['rows']:,}",
            f"{even['valid_rows']:,}",
            f"{even['tile_rows']:,}",
            share(even["padding_rows"], layout["rows"]),
        )
    return table


def _bytes_table(document: dict) -> Table:
    table = Table(title="Memory: allocated by a stage, alive during it", title_justify="left")
    table.add_column("stage")
    for name in document["layouts"]:
        table.add_column(f"{name}\nallocated", justify="right")
        table.add_column(f"{name}\nalive", justify="right")
    layouts = document["layouts"].values()
    for stages in zip(*(layout["stages"] for layout in layouts), strict=True):
        cells = [(size(s["allocated_bytes"]), size(s["live_bytes"])) for s in stages]
        table.add_row(stages[0]["stage"], *(cell for pair in cells for cell in pair))
    table.add_section()
    peaks = [("", f"{layout['peak_bytes']:,} B") for layout in layouts]
    table.add_row("peak", *(cell for pair in peaks for cell in pair))
    return table


def _work_table(document: dict) -> Table:
    chosen = document["choice"]["layout"]
    layout = document["layouts"][chosen]
    table = Table(
        title=f"Least work under even routing, {chosen}",
        title_justify="left",
    )
    table.add_column("stage")
    for column in ("moved", "GFLOP", "roofline time"):
        table.add_column(column, justify="right")
    for stage in layout["stages"]:
        table.add_row(
            stage["stage"],
            size(stage["moved_bytes"]),
            f"{stage['flops'] / 1e9:,.2f}" if stage["flops"] else "-",
            microseconds(stage["seconds"]),
        )
    table.add_section()
    table.add_row(
        "sum",
        size(layout["moved_bytes"]),
        f"{layout['flops'] / 1e9:,.2f}",
        microseconds(layout["seconds"]),
    )
    return table


def _show(document: dict, to: Console) -> None:
    to.print(escape(_title(document)), style="bold")
    for table in (_chain_table, _rows_table, _bytes_table, _work_table):
        to.print(table(document))
    budget = document["budget_bytes"]
    to.print(
        f"Weights on this rank: {size(document['weight_bytes'])}."
        f" Slab estimate {size(document['slab_bytes'])}"
        + (f" against a budget of {size(budget)}." if budget is not None else ", no budget.")
    )
    if document["floor_seconds"] is not None:
        device = document["device"]
        to.print(
            f"Floor of the layer: {microseconds(document['floor_seconds'])} (weights of the used"
            f" experts read once, or the products; {device['source']}:"
            f" {device['hbm_bytes_per_s'] / 1e12:g} TB/s, {device['fp8_flops'] / 1e12:g} fp8,"
            f" {device['bf16_flops'] / 1e12:g} bf16 TFLOP/s)."
        )
    for reason in document["illegal"].values():
        to.print(f"[red]{escape(reason)}[/red]")


def _memory_bytes(gpu: str, device_memory_gib: float | None) -> int | None:
    if gpu == "cpu":
        if device_memory_gib is not None:
            raise click.UsageError("--device-memory-gib is for a GPU: a CPU has no slab budget")
        return None
    gib = GPUS[gpu].memory_gib if device_memory_gib is None else device_memory_gib
    return int(gib * planning.GIB)


def _drawn_counts(call: Call, file: Path | None, seed: int) -> list[int]:
    if file is None:
        if call.tokens * call.experts > MOST_DRAWN:
            raise click.UsageError(
                f"--plot draws a random routing of at most {MOST_DRAWN} tokens times experts, got"
                f" {call.tokens * call.experts}: give --routing, or fewer tokens"
            )
        return routing.random_counts(call, seed)
    try:
        ids = routing.read_ids(file)
    except (OSError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--routing") from error
    wanted = (call.tokens, call.top_k)
    if tuple(ids.shape) != wanted:
        raise click.BadParameter(
            f"{file} must have {wanted[0]} tokens of {wanted[1]} ids, got {tuple(ids.shape)}",
            param_hint="--routing",
        )
    return routing.row_counts(ids, call.local_experts)


@click.command(cls=Command, short_help="Which layout a call takes, why, and what it costs.")
@click.option(
    "--tokens", required=True, type=click.IntRange(0, MOST_TOKENS), help="rows of hidden_states"
)
@sizes
@click.option("--recipe", default="fp8_block", show_default=True, type=click.Choice(list(RECIPES)))
@click.option(
    "--layout", default="auto", show_default=True, type=click.Choice(list(LAYOUT_ARGUMENTS))
)
@click.option(
    "--gpu",
    default="H200",
    show_default=True,
    type=click.Choice([*GPUS, "cpu"], case_sensitive=False),
    help="whose memory and rates to plan with",
)
@click.option(
    "--device-memory-gib",
    type=Finite(0, 2**20, min_open=True),
    help="total memory  [default: of the GPU]",
)
@click.option("--json", "as_json", is_flag=True, help="write one JSON document, in bytes")
@click.option(
    "--plot",
    type=NamedPath(dir_okay=False),
    help="draw both layouts to scale into this file: PNG, SVG or PDF by its suffix, PNG without"
    " one",
)
@click.option(
    "--routing",
    "routing_file",
    type=NamedPath(exists=True, dir_okay=False),
    help="a JSON list of lists of expert ids to draw  [default: random, of at most"
    f" {MOST_DRAWN} tokens times experts]",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, 2**63 - 1),
    help="of the random routing to draw",
)
def plan(
    tokens: int,
    experts: int,
    hidden: int,
    intermediate: int,
    top_k: int,
    recipe: str,
    local_experts: int | None,
    layout: str,
    gpu: str,
    device_memory_gib: float | None,
    as_json: bool,
    plot: Path | None,
    routing_file: Path | None,
    seed: int,
) -> None:
    """Say which layout a call takes and why, and what it allocates, moves and computes."""
    local = experts if local_experts is None else local_experts
    check_sizes(experts, local, top_k)
    if routing_file is not None and plot is None:
        raise click.UsageError("--routing says what --plot draws: give both")
    device = GPUS.get(gpu)
    arch = device.arch if device else "cpu"
    forms = platforms.scale_layouts(arch, recipe)
    call = Call(
        tokens,
        experts,
        local,
        hidden,
        intermediate,
        top_k,
        RECIPES[recipe],
        packed=forms[:1] == ("packed_ue8m0",),
        arch=arch,
    )
    even = routing.even_counts(call)
    memory_bytes = _memory_bytes(gpu, device_memory_gib)
    try:
        document = planning.build(call, layout, device, memory_bytes, even)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if plot is not None:
        document["plot"] = _plot(plot, call, document, routing_file, seed)
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    to = console()
    _show(document, to)
    if plot is not None:
        to.print(f"Drawn: {plot}")


def _plot(file: Path, call: Call, document: dict, routing_file: Path | None, seed: int) -> dict:
    try:
        from .drawing import draw
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise click.ClickException(
            "--plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    counts = _drawn_counts(call, routing_file, seed)
    source = f"routing of {routing_file.name}" if routing_file else f"random routing, seed {seed}"
    try:
        draw(file, call, counts, _title(document), source)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--plot: {error}") from error
    shares = {layout.value: planning.padding(call, layout, counts) for layout in Layout}
    return {"file": str(file), "routing": source, "layouts": shares}
