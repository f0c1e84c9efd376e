"""The tables of README.md and docs/, by name: each is made from code or committed results."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from dgmoe_ops import config
from dgmoe_ops.backends import platforms
from dgmoe_ops.backends.deep_gemm.versions import WHEELS
from dgmoe_ops.checkpoints import LAYOUTS
from dgmoe_ops.layer.activations import activation_table
from dgmoe_ops.layer.routing import routing_table

from . import results

SM90 = Path(__file__).parents[2] / "csrc" / "gemm" / "sm90"
#: architectures on which the CUDA tests have run
RUN_ON = ("cpu", 90)
_SCALES = {"block_fp32": "fp32", "packed_ue8m0": "UE8M0"}


def _cell(platform: platforms.Platform, recipe: str) -> str:
    """Who runs a recipe on a platform, in which layouts, with which weight scales."""
    parts = []
    for backend in platform.backends:
        cells = [cell for cell in backend.cells if cell.recipe == recipe]
        if not cells:
            continue
        layouts = [str(name) for name in ("masked", "contig") if name in {c.layout for c in cells}]
        scales = [text for name, text in _SCALES.items() if name in {c.scale_layout for c in cells}]
        name = "own kernels" if backend.name == "dgmoe_ops" else backend.name
        name += f", else {backend.rest}" if backend.rest else ""
        text = f"{name}: {' and '.join(layouts)}"
        parts.append(text + (f"; {' or '.join(scales)} scales" if scales else ""))
    return "<br>".join(parts) or "-"


def platform_table() -> str:
    """Lay out who runs the grouped GEMMs of each recipe on each platform, and in which layouts."""
    shown = [platform for platform in platforms.PLATFORMS if platform.cells]
    heads = [p.name + ("" if p.archs[0] in RUN_ON else " (not yet run)") for p in shown]
    lines = [f"| recipe | {' | '.join(heads)} |", "|" + "---|" * (len(heads) + 1)]
    for recipe in ("bf16", "fp8_block", "mxfp8", "mxfp4"):
        lines.append(f"| `{recipe}` | {' | '.join(_cell(p, recipe) for p in shown)} |")
    return "\n".join(lines)


def _ends(layout) -> str:
    """The names of a layout's tensors, below the prefix of its layer."""
    stems = [stem.replace("{}", "N") for stem in (*layout.w13, layout.w2)]
    ends = [end for end in (layout.weight, layout.scale, layout.bias) if end is not None]
    head = stems[0].rpartition(".")[0] + "."
    names = ",".join(stem.removeprefix(head) for stem in stems)
    more = ",".join(end for end in ends if end) if len(ends) > 1 else ends[0]
    if len(ends) > 1 and "" in ends:
        more = "," + more
    text = f"{head}{{{names}}}" + (f"{{{more}}}" if len(ends) > 1 else more)
    return f"`{text}`"


def checkpoint_table() -> str:
    """Lay out the checkpoint layouts: who has them, the names of their tensors and their forms."""
    lines = [
        "| layout | used by | tensors below `<prefix>.` | forms |",
        "|---|---|---|---|",
    ]
    for name, layout in LAYOUTS.items():
        forms = ", ".join(form.name.lower() for form in layout.forms)
        lines.append(f"| `{name}` | {layout.models} | {_ends(layout)} | {forms} |")
    return "\n".join(lines)


def wheel_table() -> str:
    """Lay out the DeepGEMM that fits each line of PyTorch, and the extra that pins both."""
    lines = ["| PyTorch | DeepGEMM | extra |", "|---|---|---|"]
    for (major, minor), (release, pins) in sorted(WHEELS.items()):
        needs = " ".join([f"sgl-deep-gemm=={release}", *pins])
        lines.append(f"| {major}.{minor} | `{needs}` | `deepgemm-torch{major}{minor}` |")
    return "\n".join(lines)


def variable_table() -> str:
    """Lay out the `DGMOE_*` variables with their defaults and the first sentence on each."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for variable in config.VARIABLES:
        text = " ".join((variable.read.__doc__ or "").split("\n\n")[0].split())
        text = text.removeprefix(f"`{variable.name}`").lstrip()
        if text.startswith("("):
            text = text.partition(")")[2]
        meaning = text.lstrip(": ").rstrip(".").replace("|", "\\|")
        lines.append(f"| `{variable.name}` | {variable.default} | {meaning} |")
    return "\n".join(lines)


def _header_rows(path: Path) -> dict[str, str]:
    """The table at the head of a kernel's source: lines `// key   value`, continued under it."""
    rows: dict[str, str] = {}
    last = ""
    for line in path.read_text().splitlines():
        if not line.startswith("//"):
            break
        if found := re.match(r"^// ([A-Za-z][A-Za-z ]*?[A-Za-z])  +(\S.*)$", line):
            last = found[1]
            rows[last] = found[2]
        elif last and (more := re.match(r"^// {10,}(\S.*)$", line)):
            rows[last] += " " + more[1]
        else:
            last = ""
    return rows


def sm90_table() -> str:
    """Lay out the tables at the heads of the SM90 MX kernels side by side."""
    kernels = [f"mx_{size}_m" for size in ("small", "medium", "large")]
    found = [_header_rows(SM90 / f"{kernel}.cuh") for kernel in kernels]
    heads = [f"`sm90_{kernel}`" for kernel in kernels]
    lines = [f"| | {' | '.join(heads)} |", "|" + "---|" * (len(heads) + 1)]
    for key in found[0]:
        lines.append(f"| {key} | {' | '.join(rows[key] for rows in found)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "activations": activation_table,
    "approximate": results.approximate_table,
    "checkpoints": checkpoint_table,
    "doctor": results.doctor_text,
    "eager": results.eager_table,
    "eager-large": lambda: results.speed_table(column="eager us"),
    "host": results.host_table,
    "ops": results.ops_table,
    "platforms": platform_table,
    "prefill": lambda: results.recipes_table(results.PREFILL_RESULT),
    "ratios": results.ratio_table,
    "recipes": results.recipes_table,
    "routings": routing_table,
    "sm90": sm90_table,
    "sanitizers": results.sanitizers_table,
    "speed": results.speed_table,
    "suite": results.suite_table,
    "summary": results.summary_table,
    "wheels": wheel_table,
}
