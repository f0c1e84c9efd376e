"""The pages of the reference, from docstrings, the contracts in csrc/ and registered schemas."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch

import dgmoe_ops
from dgmoe_ops import config

from .tables import variable_table

ROOT = Path(__file__).parents[2]
ROOMS = {
    "layer": "The layer",
    "weights": "Weights",
    "scale": "Scales",
    "route": "Routing",
    "permute": "Permutation",
    "gemm": "GEMMs",
    "activation": "Activations",
    "combine": "Combine",
}
#: what an application calls, a page a part; every public name stands on one of these, or is an op
PYTHON = {
    "layer": ("The layer", ("fused_moe", "fused_moe_inline", "moe_block", "router_logits")),
    "weights": (
        "Weights and checkpoints",
        (
            "prepare_weights",
            "MoEWeights",
            "load_moe_layer",
            "infer_recipe",
            "scale_recipes",
            "export_weights",
            "export_biases",
        ),
    ),
    "running": (
        "Warm-up and scopes",
        (
            "warmup",
            "plan_warmup",
            "LayerShape",
            "num_sms",
            "pdl",
            "contiguous_alignment",
            "down_gemm_overlap",
        ),
    ),
}
MODULES = ("activations", "checkpoints", "layouts", "ops", "platforms", "recipes", "routing")
_NOTE = "<!-- Generated when the documentation is built: see docs/scripts/reference.py. -->\n"


def ops() -> list[str]:
    """The public ops, without overloads."""
    names = {
        name.removeprefix("dgmoe::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("dgmoe::")
    }
    return sorted(name for name in names if not name.startswith("_"))


def contract(op: str) -> tuple[str, str] | None:
    """The room of an op and the comment at the head of its contract; None where there is none."""
    for header in sorted((ROOT / "csrc").glob(f"*/{op}.h")):
        lines = []
        for line in header.read_text().splitlines():
            if not line.startswith("//"):
                break
            lines.append(line.removeprefix("//").removeprefix(" "))
        if lines and lines[0].startswith(f"{op}: "):
            return header.parent.name, "\n".join(lines)
    return None


def room_of(op: str) -> str | None:
    """The room of an op; None where it has no contract, nor is one of Python's."""
    found = contract(op)
    if found:
        return found[0]
    return "layer" if hasattr(dgmoe_ops, op) else None


def _wrapper(op: str) -> str | None:
    """Where the op's Python function is documented."""
    if hasattr(dgmoe_ops.ops, op):
        return f"dgmoe_ops.ops.{op}"
    return f"dgmoe_ops.{op}" if hasattr(dgmoe_ops, op) else None


def _summary(op: str) -> str:
    """What the op does, in a line: the first sentence of its contract, else of its docstring."""
    found = contract(op)
    if found:
        text = found[1].split("\n  ")[0].removeprefix(f"{op}: ")
    else:
        text = inspect.getdoc(getattr(dgmoe_ops, op)).split("\n\n")[0]
    return re.split(r"(?<=\.)\s", " ".join(text.split()))[0].rstrip(".").replace("|", "\\|")


def _schemas(op: str) -> str:
    packet = getattr(torch.ops.dgmoe, op)
    return "\n".join(str(getattr(packet, overload)._schema) for overload in packet.overloads())


def ops_index() -> str:
    """The page that lists every op: its room and what it does."""
    lines = [
        _NOTE,
        "# Ops",
        "",
        "Each op is `torch.ops.dgmoe.<name>`, with a CPU kernel, a CUDA kernel and a fake kernel;"
        " `dgmoe_ops.ops` has a typed function of the same name.",
        "",
        "| op | room | what it does |",
        "|---|---|---|",
    ]
    for room in ROOMS:
        for op in ops():
            if room_of(op) == room:
                lines.append(f"| [`{op}`]({room}.md#{op}) | {room} | {_summary(op)} |")
    return "\n".join(lines) + "\n"


def _op_section(op: str) -> str:
    lines = [f"## `{op}` {{ #{op} }}", ""]
    wrapper = _wrapper(op)
    if wrapper and op not in PYTHON["layer"][1]:
        lines += [f"::: {wrapper}", "    options:", "      show_root_heading: false", ""]
    elif wrapper:
        lines += [f"See [`dgmoe_ops.{op}`](../python/layer.md).", ""]
    lines += ['??? note "Schema"', "", "    ```text"]
    lines += [f"    {line}" for line in _schemas(op).splitlines()]
    lines += ["    ```", ""]
    found = contract(op)
    if found:
        lines += [f'??? note "Contract: csrc/{found[0]}/{op}.h"', "", "    ```text"]
        lines += [f"    {line}" for line in found[1].splitlines()]
        lines += ["    ```", ""]
    return "\n".join(lines)


def helpers(room: str) -> list[str]:
    """The functions of a room's module that are no ops themselves."""
    public = (name for name in dgmoe_ops.ops.__all__ if name not in ops())
    modules = {name: getattr(dgmoe_ops.ops, name).__module__ for name in public}
    return sorted(name for name, module in modules.items() if module.endswith(f".{room}"))


def _room_page(room: str, title: str) -> str:
    sections = [_op_section(op) for op in ops() if room_of(op) == room]
    for name in helpers(room):
        sections += [f"## `{name}`", "", f"::: dgmoe_ops.ops.{name}"]
        sections += ["    options:", "      show_root_heading: false", ""]
    return "\n".join([_NOTE, f"# {title}", "", *sections])


def _python_page(title: str, names: tuple[str, ...]) -> str:
    lines = [_NOTE, f"# {title}", ""]
    for name in names:
        lines += [f"::: dgmoe_ops.{name}", "    options:", "      heading_level: 2", ""]
    return "\n".join(lines)


def _environment_page() -> str:
    lines = [
        _NOTE,
        "# Environment",
        "",
        "Variables are read at call time. `python -m dgmoe_ops doctor` shows their values."
        " Switches take 1, true, on, yes, 0, false, off and no, in any case; the empty string is as"
        " unset; any other value is refused by the variable's name.",
        "",
        variable_table(),
        "",
    ]
    for variable in config.VARIABLES:
        text = inspect.getdoc(variable.read)
        lines += [f"## `{variable.name}`", "", f"Default: `{variable.default}`", "", text, ""]
    lines += [
        "## The build",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
        "| `CUDA_HOME` | `/usr/local/cuda` | where nvcc is looked for first |",
        "| `DGMOE_CUDA` | 1 | 0: build the CPU library only |",
        "| `DGMOE_CUDA_ARCHS` | 90a;100a;120a | architectures of the CUDA library |",
        "| `MAX_JOBS` | all cores | compilers at once |",
        "",
        "`DGMOE_HYPOTHESIS_PROFILE=fuzz` makes the property tests search longer (`make fuzz`).",
        "",
    ]
    return "\n".join(lines)


def unplaced() -> list[str]:
    """Public names of the package that stand on no page."""
    placed = {name for _, names in PYTHON.values() for name in names}
    return sorted(set(dgmoe_ops.__all__) - placed - set(MODULES) - {"LIBRARIES"})


def pages() -> dict[str, str]:
    """Every generated page, by its path below docs/."""
    if unplaced():
        raise ValueError(f"docs/scripts/reference.py: no page has {', '.join(unplaced())}")
    made = {"reference/ops/index.md": ops_index(), "reference/environment.md": _environment_page()}
    for room, title in ROOMS.items():
        made[f"reference/ops/{room}.md"] = _room_page(room, title)
    for page, (title, names) in PYTHON.items():
        made[f"reference/python/{page}.md"] = _python_page(title, names)
    return made
