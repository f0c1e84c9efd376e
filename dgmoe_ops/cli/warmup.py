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
from .text import console, size

_COUNT = click.IntRange(min=1)


class Tokens(click.ParamType):
    """`1,8,32`, or `1:512` with both ends."""

    name = "1,8,32 | 1:512"

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            return value
        try:
            if ":" in value:
                first, last = map(int, value.split(":"))
                if not 0 <= first <= last:
                    raise ValueError
                return first, last
            counts = [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is neither counts 1,8,32 nor a span 1:512", param, ctx)
        if min(counts) < 0:
            self.fail(f"{value!r} has a count below 0", param, ctx)
        return counts


def _table(calls: list[KernelCall]) -> Table:
    table = Table(title=f"{len(calls)} calls", title_justify="left")
    table.add_column("op")
    for column in ("n", "k", "experts", "m", "expected_m", "weight", "rest"):
        table.add_column(column, justify="right")
    for call in calls:
        spec = call.spec
        sizes = (spec.n, spec.k, spec.experts, spec.m)
        table.add_row(
            call.op,
            *map(str, sizes),
            str(spec.expected_m) if spec.masked else "-",
            size(weight_bytes(call, False)),
            size(operand_bytes(call, False)),
        )
    return table


def _show(report: WarmupReport, to: Console) -> None:
    to.print(escape(str(report)), soft_wrap=True)


@click.command(short_help="Compile the kernels of a layer before it serves.")
@click.option("--tokens", required=True, type=Tokens(), help="rows of hidden_states")
@click.option("--experts", required=True, type=_COUNT, help="experts over all ranks")
@click.option("--hidden", required=True, type=_COUNT)
@click.option("--intermediate", required=True, type=_COUNT)
@click.option("--top-k", required=True, type=_COUNT)
@click.option("--recipe", default="fp8_block", show_default=True, type=click.Choice(list(RECIPES)))
@click.option("--local-experts", type=_COUNT, help="experts of this rank  [default: all]")
@click.option(
    "--layout",
    default="both",
    show_default=True,
    type=click.Choice(["both", *(name.value for name in Layout)]),
)
@click.option("--alignment", type=_COUNT, help="of contiguous segments  [default: 128]")
@click.option("--device", default="cuda", show_default=True)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="the library's cache folder  [default: DGMOE_JIT_CACHE_DIR]",
)
@click.option(
    "--nvrtc/--nvcc", "nvrtc", default=None, help="the compiler  [default: DGMOE_JIT_NVRTC]"
)
@click.option(
    "--lock-timeout",
    default=jit_cache.LOCK_TIMEOUT,
    show_default=True,
    type=click.FloatRange(min=0),
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
    if local > experts:
        raise click.UsageError(f"--local-experts {local} is more than --experts {experts}")
    if top_k > experts:
        raise click.UsageError(f"--top-k {top_k} is more than --experts {experts}")
    what = LayerShape(local, hidden, intermediate, top_k, recipe, experts)
    layouts = tuple(Layout) if layout == "both" else (layout,)
    if dry_run:
        calls = plan_warmup(what, tokens=tokens, layouts=layouts, alignment=alignment)
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
