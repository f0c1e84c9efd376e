"""What runs on a GPU showed, as small JSON files beside the measured tables.

    python3 -m benchmarks.evidence suite tests.xml [more.xml ...] --out benchmarks/results
    python3 -m benchmarks.evidence sanitizers memcheck.log racecheck.log --out benchmarks/results
    python3 -m benchmarks.evidence approximate --out benchmarks/results
    python3 -m benchmarks.evidence doctor --out benchmarks/results

`suite` counts what pytest's --junitxml reports, `sanitizers` reads logs of compute-sanitizer over
`benchmarks.sanitize`, and `approximate` measures how far activations move when the hardware
approximates them. Each writes `<what>_<gpu>.json`, `doctor` text, which the documentation shows.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import click
import torch
from click.testing import CliRunner

from dgmoe_ops import ops
from dgmoe_ops.cli.main import main as command_line
from dgmoe_ops.formats.layouts import ScaleLayout
from dgmoe_ops.reference.scale import dequantized_scale
from dgmoe_ops.testing.approximate import SCALE_TOLERANCE, ordered_e4m3

from .report import RESULTS, Row, environment

SUMMARIES = (
    re.compile(r"=+ ERROR SUMMARY: (\d+) errors?"),
    re.compile(r"=+ RACECHECK SUMMARY: (\d+) hazards? displayed"),
)
CALLS = re.compile(r"^(\w+): (\d+) (samples|MX products)$", re.MULTILINE)
GROUP = 128


def meta(device: torch.device, command: str) -> Row:
    """The machine and the versions, with the command that was run."""
    return {**environment(device), "command": command}


def result_path(what: str, device: torch.device, out: Path, suffix: str = "json") -> Path:
    """`<what>_<gpu>.<suffix>` in a folder that exists; the GPU is the last word of its name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    out.mkdir(parents=True, exist_ok=True)
    return out / f"{what}_{name.split()[-1].lower()}.{suffix}"


def write(what: str, device: torch.device, out: Path, document: dict) -> Path:
    """Write `<what>_<gpu>.json`."""
    path = result_path(what, device, out)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


# ---- the test suite ----


def count_suite(reports: Sequence[Path]) -> dict:
    """The counts of pytest's JUnit reports, and how many tests were skipped for which reason."""
    counts, reasons = Counter(passed=0, failed=0, errors=0, skipped=0), Counter()
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            skipped = case.find("skipped")
            if case.find("error") is not None:
                counts["errors"] += 1
            elif case.find("failure") is not None:
                counts["failed"] += 1
            elif skipped is not None:
                counts["skipped"] += 1
                reasons[skipped.get("message", "").strip()] += 1
            else:
                counts["passed"] += 1
    skipped = [{"tests": tests, "reason": reason} for reason, tests in reasons.most_common()]
    return {"counts": dict(counts), "skipped": skipped}


# ---- compute-sanitizer ----


def read_sanitizer(tool: str, log: str) -> Row:
    """One tool's row: how many calls it watched, and what it found.

    Raises ValueError where the log has no summary: the tool did not finish.
    """
    found = [int(match) for pattern in SUMMARIES for match in pattern.findall(log)]
    if not found:
        raise ValueError(f"the log of {tool} has no summary")
    calls = [(int(number), what) for _, number, what in CALLS.findall(log)]
    return {
        "tool": tool,
        "ops": len({op for op, _, _ in CALLS.findall(log)}),
        "calls": sum(number for number, _ in calls),
        "MX products": sum(number for number, what in calls if what == "MX products"),
        "findings": sum(found),
    }


# ---- approximate activations ----

#: op family, parameters, for people to read
ACTIVATIONS = (
    ("silu_and_mul", {}, "silu"),
    ("silu_and_mul", {"swiglu_limit": 10.0}, "silu, limit 10"),
    ("silu_and_mul", {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, "swigluoai"),
    ("situ_and_mul", {"beta": 4.0, "linear_beta": 25.0}, "situ"),
)
SCALES = {
    "fp32": {"scale_layout": ScaleLayout.MN_MAJOR},
    "UE8M0": {"scale_layout": ScaleLayout.PACKED_UE8M0},
}


@contextmanager
def exact(on: bool) -> Iterator[None]:
    """Set `DGMOE_EXACT_ACTIVATION`, which the libraries read at every call."""
    before = os.environ.get("DGMOE_EXACT_ACTIVATION")
    os.environ["DGMOE_EXACT_ACTIVATION"] = "1" if on else "0"
    try:
        yield
    finally:
        del os.environ["DGMOE_EXACT_ACTIVATION"]
        if before is not None:
            os.environ["DGMOE_EXACT_ACTIVATION"] = before


def compare_quantised(
    got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]
) -> Row:
    """Count e4m3 values that differ, where their group has the same scale, and groups that do
    not."""
    groups = -(-want[0].shape[-1] // GROUP)
    have, need = (dequantized_scale(scale.cpu(), groups) for scale in (got[1], want[1]))
    other = (have - need).abs() > SCALE_TOLERANCE * need.abs()
    apart = (ordered_e4m3(got[0]) - ordered_e4m3(want[0])).abs()
    apart = apart.masked_fill(other.repeat_interleave(GROUP, -1)[..., : apart.shape[-1]], 0)
    return {
        "values": apart.numel(),
        "one step": int((apart == 1).sum()),
        "further": int((apart > 1).sum()),
        "groups": other.numel(),
        "other scale": int(other.sum()),
    }


def measure_approximate(device: torch.device, rows: int, columns: int) -> list[Row]:
    """Compare approximate activations with exact ones, on random rows of GEMM1's result."""
    found = []
    for number, (family, parameters, name) in enumerate(ACTIVATIONS):
        generator = torch.Generator().manual_seed(number)
        gate_up = torch.randn(rows, 2 * columns, generator=generator) * 3
        gate_up = gate_up.bfloat16().to(device)
        op: Callable = getattr(ops, f"{family}_post_quant_contig")
        for scales, layout in SCALES.items():
            with exact(False):
                got = op(gate_up, **layout, **parameters)
            with exact(True):
                want = op(gate_up, **layout, **parameters)
            counts = compare_quantised(got, want)
            found.append({"op": op.__name__, "activation": name, "scales": scales, **counts})
    return found


# ---- the commands ----


def common(command: Callable) -> Callable:
    """The options of every command."""
    command = click.option("--out", type=Path, default=RESULTS, help="folder of the file")(command)
    return click.option("--device", default="cuda", show_default=True)(command)


@click.group()
def main() -> None:
    """Write down what runs on a GPU showed."""


@main.command()
@click.argument("reports", nargs=-1, required=True, type=Path)
@click.option("--command", default="pytest --device cuda", show_default=True)
@common
def suite(reports: tuple[Path, ...], command: str, device: str, out: Path) -> None:
    """Count the tests of JUnit reports that pytest wrote."""
    where = torch.device(device)
    document = {"meta": meta(where, command), **count_suite(reports)}
    click.echo(write("cuda_suite", where, out, document))
    click.echo(json.dumps(document["counts"]))


@main.command()
@click.argument("logs", nargs=-1, required=True, type=Path)
@common
def sanitizers(logs: tuple[Path, ...], device: str, out: Path) -> None:
    """Sum up logs of compute-sanitizer, each named after its tool."""
    where = torch.device(device)
    command = "compute-sanitizer --tool TOOL python3 -m benchmarks.sanitize"
    rows = [read_sanitizer(log.stem, log.read_text(errors="replace")) for log in logs]
    click.echo(write("sanitizers", where, out, {"meta": meta(where, command), "rows": rows}))
    for row in rows:
        click.echo(json.dumps(row))


@main.command()
@common
def doctor(device: str, out: Path) -> None:
    """Keep what `doctor --prove` says, without the home folder's name."""
    done = CliRunner().invoke(command_line, ["doctor", "--prove"])
    lines = [line.rstrip() for line in done.output.replace(str(Path.home()), "~").splitlines()]
    text = "\n".join(["$ python -m dgmoe_ops doctor --prove", *lines, ""])
    path = result_path("doctor", torch.device(device), out, "txt")
    path.write_text(text)
    click.echo(path)


@main.command()
@click.option("--rows", default=16384, show_default=True)
@click.option("--columns", default=2048, show_default=True)
@common
def approximate(rows: int, columns: int, device: str, out: Path) -> None:
    """Measure how far the hardware's approximations move quantised activations."""
    where = torch.device(device)
    command = f"python3 -m benchmarks.evidence approximate --rows {rows} --columns {columns}"
    document = {
        "meta": meta(where, command),
        "rows": measure_approximate(where, rows, columns),
    }
    click.echo(write("approximate_activation", where, out, document))
    for row in document["rows"]:
        click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
