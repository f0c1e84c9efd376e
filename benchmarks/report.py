"""Results: rows with the machine they were measured on, as JSON, Markdown and a terminal table."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
Row = dict[str, object]


def _version(module: str, *distributions: str) -> str:
    """The version of an importable module; a tree on PYTHONPATH may have no metadata."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return "absent"
    return getattr(importlib.import_module(module), "__version__", "present, version unknown")


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()


def _base(argument: str) -> str:
    """Drop the folder of a file: where results were written says nothing about them."""
    return argument.rsplit("/", 1)[-1]


def environment(device: torch.device) -> Row:
    """Describe the machine and the versions that a measurement depends on."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or "cpu",
        "driver": _driver() if cuda else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton", "triton"),
        "deep_gemm": _version("deep_gemm", "sgl-deep-gemm", "deep-gemm", "deep_gemm"),
        "sglang": _version("sglang", "sglang"),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": shlex.join(["python3", "-m", "benchmarks.bench", *map(_base, sys.argv[1:])]),
    }


def cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


@dataclass
class Report:
    """Rows of one table, written out after each addition so that an interrupted run keeps what it
    has.

    Attributes:
        title: heading of the Markdown file.
        columns: keys of the rows that the table shows, in order; JSON holds every key.
        meta: machine, versions, command.
        notes: sentences under the table.
        targets: files to write; the suffix (.json or .md) tells the form.
    """

    title: str
    columns: Sequence[str]
    meta: Row
    targets: Sequence[Path] = ()
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.write()

    def write(self) -> None:
        for path in self.targets:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".part")
            part.write_text(self.json() if path.suffix == ".json" else self.markdown())
            part.replace(path)

    def json(self) -> str:
        document = {"title": self.title, "meta": self.meta, "rows": self.rows, "notes": self.notes}
        return json.dumps(document, indent=1) + "\n"

    def markdown(self) -> str:
        lines = [f"# {self.title}", ""]
        lines += [f"- {key}: {cell(value)}" for key, value in self.meta.items()]
        lines += ["", f"| {' | '.join(self.columns)} |", "|---" * len(self.columns) + "|"]
        for row in self.rows:
            cells = (cell(row.get(column)).replace("|", "/") for column in self.columns)
            lines.append(f"| {' | '.join(cells)} |")
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def show(self, console: Console) -> None:
        table = Table(title=self.title, title_justify="left")
        for column in self.columns:
            table.add_column(column, overflow="fold")
        for row in self.rows:
            table.add_row(*(cell(row.get(column)) for column in self.columns))
        console.print(table)
        for note in self.notes:
            console.print(f"- {note}", markup=False, highlight=False)
