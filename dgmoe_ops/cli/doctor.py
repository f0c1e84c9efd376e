"""`doctor`: what this machine can run, what is missing, and the command that mends it."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import dgmoe_ops

from ..analysis import diagnosis
from ..analysis.machine import Machine, look
from ..backends import deep_gemm, platforms
from ..formats.layouts import Layout
from .options import Command
from .text import console, size


def build(machine: Machine) -> dict:
    """Build the document of a machine: its facts and what follows from them."""
    wheel = diagnosis.install_command(machine)
    return {
        "dgmoe_ops": dgmoe_ops.__version__,
        **asdict(machine),
        "deep_gemm": {
            "found": machine.deep_gemm,
            "fits": diagnosis.deep_gemm_fits(machine),
            "fitting": wheel,
        },
        "backends": diagnosis.table(machine),
        "problems": [asdict(problem) for problem in diagnosis.problems(machine)],
        "can_run": diagnosis.can_run(machine),
    }


def prove(document: dict) -> None:
    """Try the library instead of trusting versions, and put into the document what came of it."""
    if not document["devices"]:
        document["deep_gemm"]["proof"] = "not tried: no GPU"
        return
    try:
        deep_gemm.prove_fit("cuda")
        document["deep_gemm"].update(fits=True, proof="a product of known result is right")
    except RuntimeError as error:
        document["deep_gemm"].update(fits=False, proof=str(error))
        document["can_run"] = False


def _fits_text(fits: bool | None) -> str:
    return {True: "fits", False: "does not fit", None: "unknown whether it fits"}[fits]


def _facts_table(document: dict) -> Table:
    table = Table(title="This machine", title_justify="left", show_header=False)
    table.add_column("fact")
    table.add_column("value")
    cuda = document["torch_cuda"]
    table.add_row(
        "dgmoe_ops", f"{document['dgmoe_ops']}, loaded {', '.join(document['libraries'])}"
    )
    table.add_row("Python", document["python"])
    table.add_row("torch", f"{document['torch']}, {f'CUDA {cuda}' if cuda else 'no CUDA'}")
    for index, device in enumerate(document["devices"]):
        arch, memory = platforms.arch_name(device["arch"]), size(device["memory_bytes"])
        table.add_row(f"device {index}", escape(f"{device['name']}, {arch}, {memory}"))
    if not document["devices"]:
        table.add_row("devices", "CPU only")
    gemm = document["deep_gemm"]
    found = "not installed" if gemm["found"] is None else gemm["found"]
    verdict = "" if gemm["found"] is None else f", {_fits_text(gemm['fits'])} this torch"
    table.add_row("DeepGEMM", found + verdict)
    if "proof" in gemm:
        table.add_row("DeepGEMM, tried", escape(gemm["proof"]))
    nvcc = document["nvcc"]
    table.add_row("nvcc", f"{nvcc}, {document['nvcc_version']}" if nvcc else "not found")
    kernels = f"{document['jit_kernels']} compiled kernels, by {document['jit_compiler']}"
    table.add_row("DeepGEMM's cache", escape(f"{document['jit_cache']}, {kernels}"))
    for setting in document["settings"]:
        value = setting["value"] if setting["error"] is None else "not legal"
        table.add_row(setting["name"], f"{value} (default {setting['default']})")
    return table


def _backend_table(document: dict) -> Table:
    table = Table(title="What runs the grouped GEMMs", title_justify="left")
    for column in ("device", "recipe", *(layout.value for layout in Layout)):
        table.add_column(column)
    rows: dict[tuple[str, str], list[str]] = {}
    for row in document["backends"]:
        rows.setdefault((row["device"], row["recipe"]), []).append(escape(row["backend"]))
    for head, cells in rows.items():
        table.add_row(*head, *cells)
    return table


def _show(document: dict, to: Console) -> None:
    to.print(_facts_table(document))
    to.print(_backend_table(document))
    for problem in document["problems"]:
        mark = "[red]missing[/red]" if problem["blocks"] else "[yellow]note[/yellow]"
        to.print(f"{mark}: {escape(problem['what'])}\n  {escape(problem['fix'])}", soft_wrap=True)
    where = "on a GPU" if document["devices"] else "on the CPU"
    if document["can_run"]:
        to.print(f"[green]The layer can run here, {where}.[/green]")
    else:
        to.print(f"[red]The layer cannot run here {where}.[/red]")


@click.command(cls=Command, short_help="What this machine can run, and what is missing.")
@click.option("--json", "as_json", is_flag=True, help="write one JSON document")
@click.option(
    "--prove",
    "try_it",
    is_flag=True,
    help="also import DeepGEMM and check one small product on the GPU",
)
@click.pass_context
def doctor(context: click.Context, as_json: bool, try_it: bool) -> None:
    """Say what this machine can run, what is missing, and the command that mends it.

    Exits with 0 if the layer can run here: on a GPU where there is one, else on the CPU.
    """
    document = build(look())
    if try_it:
        prove(document)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _show(document, console())
    if not document["can_run"]:
        context.exit(1)
