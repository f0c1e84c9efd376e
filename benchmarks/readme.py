"""The README's speed table, drawn from a committed result: `python3 -m benchmarks.readme`."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
RESULT = RESULTS / "layer_h200.json"
HOST_RESULT = RESULTS / "host_h200.json"
RECIPES_RESULT = RESULTS / "recipes_h200.json"
PREFILL_RESULT = RESULTS / "recipes_prefill_h200.json"
OPS_RESULT = RESULTS / "activation_route_h200.json"
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


if __name__ == "__main__":
    print(ops_table())
    print()
    print(recipes_table())
    print()
    print(recipes_table(PREFILL_RESULT))
    print()
    print(host_table())
    print()
    print(speed_table())
    print()
    print(speed_table(column="eager us"))
