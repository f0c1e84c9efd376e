"""Tables of committed results, as Markdown."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RESULT = RESULTS / "layer_h200.json"
EAGER_RESULT = RESULTS / "eager_h200.json"
HOST_RESULT = RESULTS / "host_h200.json"
RECIPES_RESULT = RESULTS / "recipes_h200.json"
PREFILL_RESULT = RESULTS / "recipes_prefill_h200.json"
OPS_RESULT = RESULTS / "activation_route_h200.json"
SUITE_RESULT = RESULTS / "cuda_suite_h200.json"
SANITIZER_RESULT = RESULTS / "sanitizers_h200.json"
DOCTOR_RESULT = RESULTS / "doctor_h200.txt"
APPROXIMATE_RESULT = RESULTS / "approximate_activation_h200.json"
COLUMNS = {
    "ours, auto": ("dgmoe", "auto"),
    "ours, masked": ("dgmoe", "masked"),
    "ours, contig": ("dgmoe", "contig"),
    "sglang, masked": ("sglang", "masked"),
    "sglang, contig": ("sglang", "contig"),
    "sglang Triton, as shipped": ("sglang", "triton as shipped"),
    "sglang Triton, best of a sweep": ("sglang", "triton best"),
}


def _number(value: object) -> str:
    if not isinstance(value, (int, float)):
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _fastest(rows: list[dict], layer: str, *layouts: str) -> float | None:
    """The least time of a layer among some of its variants; None where none ran."""
    times = [
        row["total us"]
        for row in rows
        if row["layer"] == layer and row["layout"] in layouts and row.get("total us")
    ]
    return min(times, default=None)


def _calls(result: Path) -> dict[tuple[str, int], list[dict]]:
    """The fp8_block rows of a layer result, by shape and token count."""
    calls: dict[tuple[str, int], list[dict]] = {}
    for row in json.loads(result.read_text())["rows"]:
        if row["recipe"] == "fp8_block":
            calls.setdefault((row["shape"], row["T"]), []).append(row)
    return calls


OURS = ("dgmoe", "auto")
PEERS = {
    "sglang, DeepGEMM": ("sglang", "masked", "contig"),
    "sglang, Triton": ("sglang", "triton as shipped", "triton best"),
}


def summary_table(result: Path = RESULT) -> str:
    """Lay out our layer's time beside each peer's fastest variant, a line a shape and count."""
    lines = [
        f"| shape | tokens | dgmoe_ops | {' | '.join(PEERS)} | floor |",
        "|" + "---|" * (len(PEERS) + 4),
    ]
    for (shape, tokens), rows in _calls(result).items():
        times = [_fastest(rows, *who) for who in (OURS, *PEERS.values())]
        cells = [shape, str(tokens), *map(_number, times), _number(rows[0].get("floor us"))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio_table(result: Path = RESULT) -> str:
    """Lay out our time over each peer's fastest variant: below 1 ours is faster."""
    calls = _calls(result)
    shapes = list(dict.fromkeys(shape for shape, _ in calls))
    heads = [f"{shape}: over {peer}" for shape in shapes for peer in PEERS]
    lines = [f"| tokens | {' | '.join(heads)} |", "|" + "---|" * (len(heads) + 1)]
    for tokens in dict.fromkeys(tokens for _, tokens in calls):
        cells = []
        for shape in shapes:
            rows = calls.get((shape, tokens), [])
            ours = _fastest(rows, *OURS)
            for who in PEERS.values():
                theirs = _fastest(rows, *who)
                cells.append(f"{ours / theirs:.2f}" if ours and theirs else "-")
        lines.append(f"| {tokens} | {' | '.join(cells)} |")
    return "\n".join(lines)


def speed_table(result: Path = RESULT, column: str = "total us") -> str:
    """Lay out one column of a layer result, a line a shape and token count, as Markdown."""
    rows = [row for row in json.loads(result.read_text())["rows"] if row["recipe"] == "fp8_block"]
    cells = {(r["shape"], r["T"], r["layer"], r["layout"]): r.get(column) for r in rows}
    floors = {(r["shape"], r["T"]): r.get("floor us") for r in rows}
    lines = [
        "| shape | T | " + " | ".join(COLUMNS) + " | floor |",
        "|" + "---|" * (len(COLUMNS) + 3),
    ]
    for (shape, tokens), floor in floors.items():
        values = [_number(cells.get((shape, tokens, *who))) for who in COLUMNS.values()]
        lines.append(f"| {shape} | {tokens} | {' | '.join(values)} | {_number(floor)} |")
    return "\n".join(lines)


def recipes_table(result: Path = RECIPES_RESULT) -> str:
    """Lay out the times of our layer under each recipe and against fp8_block, as Markdown."""
    rows = [r for r in json.loads(result.read_text())["rows"] if r["layout"] == "auto"]
    cells = {(r["shape"], r["T"], r["recipe"]): r.get("total us") for r in rows}
    recipes = list(dict.fromkeys(r["recipe"] for r in rows))
    others = [recipe for recipe in recipes if recipe != "fp8_block"]
    heads = [f"{recipe} us" for recipe in recipes] + [f"{r} / fp8_block" for r in others]
    lines = [f"| shape | T | {' | '.join(heads)} |", "|" + "---|" * (len(heads) + 2)]
    for shape, tokens in dict.fromkeys((r["shape"], r["T"]) for r in rows):
        here = {recipe: cells.get((shape, tokens, recipe)) for recipe in recipes}
        base = here["fp8_block"]
        times = [_number(here[recipe]) for recipe in recipes]
        ratios = [f"{here[r] / base:.2f}" if here[r] and base else "-" for r in others]
        lines.append(f"| {shape} | {tokens} | {' | '.join(times + ratios)} |")
    return "\n".join(lines)


def host_table(result: Path = HOST_RESULT) -> str:
    """Lay out the host times of the GEMM ops beside the library's bare calls, as Markdown."""
    columns = ("op", "library us", "op.out us", "op us", "op - library us")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in json.loads(result.read_text())["rows"]:
        numbers = " | ".join(f"{row[column]:.1f}" for column in columns[1:])
        lines.append(f"| `{row['op']}` | {numbers} |")
    return "\n".join(lines)


def ops_table(result: Path = OPS_RESULT) -> str:
    """Lay out the times of the activations and the routers, a line an op and shape, as Markdown."""
    rows = json.loads(result.read_text())["rows"]
    counts = sorted({row["tokens"] for row in rows})
    cells = {(row["op"], row["shape"], row["tokens"]): row for row in rows}
    heads = [f"T={count} us" for count in counts]
    lines = [
        f"| op | shape | {' | '.join(heads)} | of the copy rate at T={counts[-1]} |",
        "|" + "---|" * (len(counts) + 3),
    ]
    for op, shape in dict.fromkeys((row["op"], row["shape"]) for row in rows):
        here = [cells[op, shape, count] for count in counts]
        times = " | ".join(_number(row["us"]) for row in here)
        lines.append(f"| `{op}` | {shape} | {times} | {100 * here[-1]['of copy']:.0f} % |")
    return "\n".join(lines)


def eager_table(result: Path = EAGER_RESULT) -> str:
    """Lay out the host times of eager calls with few tokens, every layout and peer."""
    return speed_table(result, "eager us")


def _meta(document: dict) -> str:
    meta = document["meta"]
    packages = [f"{name} {meta[key]}" for name, key in (("torch", "torch"), ("Python", "python"))]
    if meta.get("deep_gemm", "absent") != "absent":
        packages.append(f"sgl-deep-gemm {meta['deep_gemm']}")
    return f"{meta['device']}, {', '.join(packages)}, {meta['date']}"


def _absent(result: Path) -> str:
    return f"(No result is committed yet: `benchmarks/results/{result.name}`.)"


def suite_table(result: Path = SUITE_RESULT) -> str:
    """Lay out the counts of the test suite on a GPU, and why tests were skipped."""
    if not result.exists():
        return _absent(result)
    document = json.loads(result.read_text())
    counts = document["counts"]
    lines = [
        f"`{document['meta']['command']}` on {_meta(document)}: "
        + ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "errors", "skipped")),
        "",
        "| skipped | because |",
        "|---|---|",
    ]
    lines += [f"| {row['tests']} | {row['reason']} |" for row in document["skipped"]]
    return "\n".join(lines)


def sanitizers_table(result: Path = SANITIZER_RESULT) -> str:
    """Lay out what compute-sanitizer watched and found, a line a tool."""
    if not result.exists():
        return _absent(result)
    document = json.loads(result.read_text())
    lines = [
        f"On {_meta(document)}:",
        "",
        "| tool | calls of ops | MX products among them | findings |",
        "|---|---|---|---|",
    ]
    for row in document["rows"]:
        cells = (row["tool"], row["calls"], row["MX products"], row["findings"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def approximate_table(result: Path = APPROXIMATE_RESULT) -> str:
    """Lay out how many values an approximate activation moves, a line an activation."""
    if not result.exists():
        return _absent(result)
    document = json.loads(result.read_text())
    lines = [
        f"On {_meta(document)}, against `DGMOE_EXACT_ACTIVATION=1`:",
        "",
        "| activation | scales | values | one e4m3 step off | further off | groups rescaled |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        lines.append(
            f"| {row['activation']} | {row['scales']} | {row['values']:,} | {row['one step']:,}"
            f" | {row['further']:,} | {row['other scale']:,} of {row['groups']:,} |"
        )
    return "\n".join(lines)


def doctor_text(result: Path = DOCTOR_RESULT) -> str:
    """Show what `doctor --prove` said on a GPU."""
    return f"```text\n{result.read_text().rstrip()}\n```"
