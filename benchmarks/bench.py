"""One command for all benchmarks: `python3 -m benchmarks.bench ops` or `... layer`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from rich.console import Console

import dgmoe_ops  # noqa: F401  (registers the ops)
from benchmarks import bench_host, bench_layer, bench_ops, shapes, timing
from benchmarks.report import RESULTS, Report, environment
from dgmoe_ops.analysis.gpus import gpu_of
from dgmoe_ops.formats.recipes import RECIPES


class Budget:
    """Seconds that a run may take; 0 is no limit."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds if seconds else None

    def spent(self) -> bool:
        return self._end is not None and time.monotonic() > self._end


def _names(known: dict | tuple) -> Callable:
    def parse(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
        names = [name for name in value.split(",") if name]
        for name in names:
            if name not in known:
                raise click.BadParameter(f"{name} is none of {', '.join(known)}")
        return names

    return parse


def _counts(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        return [int(count) for count in value.split(",") if count]
    except ValueError as error:
        raise click.BadParameter(f"{value} is no list of whole numbers") from error


def shared_options(command: Callable) -> Callable:
    options = [
        click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N"),
        click.option(
            "--shapes",
            "shape_names",
            default="",
            callback=_names(shapes.SHAPES),
            help=f"comma-separated, of {', '.join(shapes.SHAPES)}; default: tiny on cpu",
        ),
        click.option("--tokens", default="", callback=_counts, help="comma-separated counts"),
        click.option("--json", "json_file", type=click.Path(path_type=Path), help="JSON result"),
        click.option("--markdown", "markdown_file", type=click.Path(path_type=Path)),
        click.option("--name", help="write benchmarks/results/NAME.json and NAME.md"),
        click.option(
            "--budget-seconds", default=0.0, help="skip what is left after this; 0: no limit"
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _device(text: str) -> torch.device:
    device = torch.device(text)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise click.UsageError(f"--device {text}: torch {torch.__version__} sees no CUDA GPU")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _targets(json_file: Path | None, markdown_file: Path | None, name: str | None) -> list[Path]:
    named = [RESULTS / f"{name}.json", RESULTS / f"{name}.md"] if name else []
    return [path for path in (json_file, markdown_file, *named) if path is not None]


def _shapes(names: list[str], device: torch.device) -> list[shapes.Shape]:
    default = ["tiny"] if device.type == "cpu" else ["qwen3-30b-a3b", "deepseek-v3"]
    return [shapes.SHAPES[name] for name in names or default]


def _console() -> Console:
    # A log file has no width of its own, and 80 columns fold every cell.
    console = Console()
    return console if console.is_terminal else Console(width=180)


def _report(title: str, columns, device: torch.device, targets: list[Path]) -> tuple[Report, float]:
    meta = environment(device)
    gpu = gpu_of(str(meta["device"]))
    if gpu:
        meta["peak rates"] = (
            f"{gpu.hbm_bytes_per_s / 1e12:g} TB/s, {gpu.fp8_flops / 1e12:g} fp8 and"
            f" {gpu.bf16_flops / 1e12:g} bf16 TFLOP/s ({gpu.source})"
        )
    rate = timing.copy_rate(device)
    meta["copy rate"] = f"{rate * 1e-9:.0f} GB/s measured, bytes read plus bytes written"
    return Report(title, columns, meta, targets), rate


@click.group()
def main() -> None:
    """Measure dgmoe_ops."""


@main.command()
@shared_options
@click.option("--room", "rooms", multiple=True, type=click.Choice(list(bench_ops.ROOMS)))
@click.option("--op", "ops", multiple=True, help="exact op name; may be given again")
@torch.inference_mode()
def ops(
    device: str,
    shape_names: list[str],
    tokens: list[int],
    json_file: Path | None,
    markdown_file: Path | None,
    name: str | None,
    budget_seconds: float,
    rooms: tuple[str, ...],
    ops: tuple[str, ...],
) -> None:
    """Time every op by itself, against the copy rate of the device."""
    unknown = set(ops) - {op for builders in bench_ops.ROOMS.values() for op in builders}
    if unknown:
        raise click.BadParameter(f"no such op: {', '.join(sorted(unknown))}", param_hint="--op")
    where = _device(device)
    targets = _targets(json_file, markdown_file, name)
    report, copy = _report("Ops of dgmoe_ops", bench_ops.COLUMNS, where, targets)
    counts = tokens or list(shapes.CPU_TOKENS if where.type == "cpu" else shapes.OP_TOKENS)
    bench_ops.run(
        report,
        _shapes(shape_names, where),
        counts,
        where,
        rooms,
        ops,
        copy,
        Budget(budget_seconds),
    )
    report.show(_console())


@main.command()
@shared_options
@click.option(
    "--recipes",
    default="fp8_block",
    show_default=True,
    callback=_names(tuple(RECIPES)),
    help=f"comma-separated, of {', '.join(RECIPES)}",
)
@click.option("--stages/--no-stages", default=True, help="also time the layer stage by stage")
@click.option("--peers/--no-peers", default=True, help="also run the peers that are importable")
@click.pass_context
@torch.inference_mode()
def layer(
    context: click.Context,
    device: str,
    shape_names: list[str],
    tokens: list[int],
    json_file: Path | None,
    markdown_file: Path | None,
    name: str | None,
    budget_seconds: float,
    recipes: list[str],
    stages: bool,
    peers: bool,
) -> None:
    """Check the whole layer, then time it against its floor and against its peers."""
    where = _device(device)
    targets = _targets(json_file, markdown_file, name)
    report, _ = _report("The MoE layer, whole", bench_layer.COLUMNS, where, targets)
    console = _console()
    counts = tokens or list(shapes.CPU_TOKENS if where.type == "cpu" else shapes.LAYER_TOKENS)
    options = bench_layer.Options(tuple(recipes), stages, peers)
    right = bench_layer.run(
        report,
        _shapes(shape_names, where),
        counts,
        where,
        options,
        Budget(budget_seconds),
        lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
    )
    report.show(console)
    if not right:
        context.exit(1)


@main.command()
@click.option("--device", default="cuda", show_default=True, help="cuda or cuda:N")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="JSON result")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path))
@click.option("--name", help="write benchmarks/results/NAME.json and NAME.md")
@torch.inference_mode()
def host(device: str, json_file: Path | None, markdown_file: Path | None, name: str | None) -> None:
    """Time the host side of the GEMM ops against bare calls of the library."""
    where = _device(device)
    if where.type != "cuda":
        raise click.UsageError("--device must be cuda: the library runs on GPUs only")
    targets = _targets(json_file, markdown_file, name)
    report, _ = _report("Host time of the GEMM ops", bench_host.COLUMNS, where, targets)
    bench_host.run(report, where)
    report.show(_console())


if __name__ == "__main__":
    main()
