"""`warmup`: compile the kernels that a layer can need, before it serves."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..backends.deep_gemm import jit_cache
from ..formats.layouts import Layout
from ..formats.recipes import RECIPES
from ..warmup.operands import operand_bytes, weight_bytes
from ..warmup.run import KernelCall, LayerShape, WarmupReport, plan_warmup
from ..warmup.run import warmup as run_warmup
from .options import (
    MOST_ALIGNMENT,
    MOST_WARMUP_TOKENS,
    Command,
    Finite,
    NamedPath,
    check_sizes,
    sizes,
)
from .text import console, size

_SHOWN_CALLS = 1000


class Tokens(click.ParamType):
    """`1,8,32`, or `1:512` with both ends."""

    name = "1,8,32 | 1:512"

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            return value
        try:
            counts = [int(part) for part in value.split(":" if ":" in value else ",")]
        except ValueError:
            counts = []
        span = ":" in value
        if not counts or (span and len(counts) != 2):
            self.fail(f"{value!r} is neither counts 1,8,32 nor a span 1:512", param, ctx)
        for count in counts:
            if not 0 <= count <= MOST_WARMUP_TOKENS:
                must = f"counts must be from 0 to {MOST_WARMUP_TOKENS}"
                self.fail(f"{must}, got {count}", param, ctx)
        if span and counts[0] > counts[1]:
            self.fail(f"{value!r} is a span that ends before it begins", param, ctx)
        return tuple(counts) if span else counts


def _table(calls: list[KernelCall]) -> Table:
    table = Table(title=f"{len(calls)} calls", title_justify="left")
    table.add_column("op")
    for column in ("n", "k", "experts", "m", "expected_m", "weight", "rest"):
        table.add_column(column, justify="right")
    for call in calls[:_SHOWN_CALLS]:
        spec = call.spec
        numbers = (spec.n, spec.k, spec.experts, spec.m)
        table.add_row(
            call.op,
            *map(str, numbers),
            str(spec.expected_m) if spec.masked else "-",
            size(weight_bytes(call, False)),
            size(operand_bytes(call, False)),
        )
    if len(calls) > _SHOWN_CALLS:
        table.caption = f"and {len(calls) - _SHOWN_CALLS} more, which --json lists"
    return table


def _show(report: WarmupReport, to: Console) -> None:
    to.print(escape(str(report)), soft_wrap=True)


@click.command(cls=Command, short_help="Compile the kernels of a layer before it serves.")
@click.option(
    "--tokens",
    required=True,
    type=Tokens(),
    help=f"rows of hidden_states, each 0 to {MOST_WARMUP_TOKENS}",
)
@sizes
@click.option("--recipe", default="fp8_block", show_default=True, type=click.Choice(list(RECIPES)))
@click.option(
    "--layout",
    default="both",
    show_default=True,
    type=click.Choice(["both", *(name.value for name in Layout)]),
)
@click.option(
    "--alignment",
    type=click.IntRange(1, MOST_ALIGNMENT),
    help="of contiguous segments  [default: 128]",
)
@click.option("--device", default="cuda", show_default=True)
@click.option(
    "--cache-dir",
    type=NamedPath(file_okay=False),
    help="the library's cache folder  [default: DGMOE_JIT_CACHE_DIR]",
)
@click.option(
    "--nvrtc/--nvcc", "nvrtc", default=None, help="the compiler  [default: DGMOE_JIT_NVRTC]"
)
@click.option(
    "--lock-timeout",
    default=jit_cache.LOCK_TIMEOUT,
    show_default=True,
    type=Finite(0, 7 * 24 * 3600),
    help="seconds to wait for another process that compiles",
)
@click.option("--dry-run", is_flag=True, help="list the calls and run nothing; needs no GPU")
@click.option("--json", "as_json", is_flag=True, help="write one JSON document")
def warmup(
    tokens: list[int] | tuple[int, int],
    experts: int,
    hidden: int,
    intermediate: int,
    top_k: int,
    recipe: str,
    local_experts: int | None,
    layout: str,
    alignment: int | None,
    device: str,
    cache_dir: Path | None,
    nvrtc: bool | None,
    lock_timeout: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Compile and load every kernel that a layer's grouped GEMMs need for these token counts.

    The kernels stay in DeepGEMM's cache folder, where the processes that serve find them.
    """
    local = experts if local_experts is None else local_experts
    check_sizes(experts, local, top_k)
    what = LayerShape(local, hidden, intermediate, top_k, recipe, experts)
    layouts = None if layout == "both" else (layout,)  # those that the device runs
    if dry_run:
        try:
            calls = plan_warmup(what, tokens=tokens, layouts=layouts, alignment=alignment)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        if as_json:
            document = {"layer": asdict(what), "calls": [call.facts() for call in calls]}
            click.echo(json.dumps(document, indent=2))
        else:
            console().print(_table(calls))
        return
    try:
        report = run_warmup(
            what,
            tokens=tokens,
            layouts=layouts,
            alignment=alignment,
            device=device,
            cache_dir=cache_dir,
            use_nvrtc=nvrtc,
            lock_timeout=lock_timeout,
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps({"layer": asdict(what), **asdict(report)}, indent=2))
    else:
        _show(report, console())
