"""The demo's two tables and its checks, printed with rich."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from . import stages
from .measure import Measurement

_CONTINUATION = 40  # characters, so that a row is one line


@dataclass(frozen=True)
class Row:
    """A variant of the model: experts that a token reads, bytes of its FFNs, figures."""

    name: str
    experts: str
    ffn_bytes: int
    measured: Measurement


@dataclass(frozen=True)
class Check:
    """A value that must not pass its bound."""

    what: str
    value: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.value <= self.bound  # False for NaN


def results_table(rows: list[Row], tokens: int, prompt: str) -> Table:
    """Perplexity, memory, time and a continuation of every row, the dense one first."""
    table = Table(title=f"SmolLM2-135M on {tokens} tokens of docstrings")
    table.add_column("FFN", no_wrap=True)
    figures = ("experts\na token", "perplexity", "to dense", "weights\nMB")
    for name in (*figures, "prefill\nms/token", "generate\nms/token"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"greedy continuation of\n{prompt!r}")
    dense = rows[0].measured.perplexity
    for row in rows:
        table.add_row(
            row.name,
            row.experts,
            f"{row.measured.perplexity:.3f}",
            f"{row.measured.perplexity / dense:.4f}",
            f"{row.ffn_bytes / 1e6:.1f}",
            f"{row.measured.prefill_ms:.2f}",
            f"{row.measured.generate_ms:.1f}",
            textwrap.shorten(row.measured.text, _CONTINUATION, placeholder=" ..."),
        )
    return table


def stages_table(title: str, rows: list[stages.StageRow], device: torch.device) -> Table:
    """What ran each stage of the layer, read from a trace."""
    table = Table(title=title)
    for name in ("stage", "op", "ran by"):
        table.add_column(name)
    for name in ("calls", "ms"):
        table.add_column(name, justify="right")
    for row in rows:
        backend = stages.backend_of(row, device)
        figures = (str(row.calls), f"{row.milliseconds:.1f}")
        table.add_row(row.stage, f"dgmoe::{row.op}", backend, *figures)
    return table


def print_checks(console: Console, checks: list[Check]) -> bool:
    """Print a line a check and say whether all hold."""
    for check in checks:
        verdict = "[green]ok[/]" if check.holds else "[red]FAILED[/]"
        console.print(f"{verdict}  {check.what}: {check.value:.4f} (at most {check.bound})")
    return all(check.holds for check in checks)
