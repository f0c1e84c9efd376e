"""Write the generated blocks of README.md and docs/ again: `python -m docs.scripts.blocks`.

A block stands between two comments. `<!-- table: NAME -->` names one of `tables.TABLES`, `<!--
output: COMMAND -->` a command of the package, which is run; `<!-- end -->` closes both. A test
holds every block to what would be written now.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from click.testing import CliRunner

from dgmoe_ops.cli.main import main as command_line

from .tables import TABLES

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^<!-- (table|output): (.+?) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
MODULE = "python -m dgmoe_ops "


def pages() -> list[Path]:
    """The pages that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """The kind and the name, or command, of each block."""
    for found in BLOCK.finditer(text):
        yield found[1], found[2]


def output(command: str) -> str:
    """What a command of the package prints, as a fenced block that begins with the command."""
    if not command.startswith(MODULE):
        raise ValueError(f"a block's command must start with {MODULE!r}, got {command!r}")
    done = CliRunner().invoke(command_line, shlex.split(command.removeprefix(MODULE)))
    if done.exit_code != 0:
        raise ValueError(f"{command} exits with {done.exit_code}: {done.output}")
    lines = [line.rstrip() for line in done.output.splitlines()]
    return "\n".join(["```text", f"$ {command}", *lines, "```"])


def content(kind: str, name: str) -> str:
    """What a block must hold."""
    return TABLES[name]() if kind == "table" else output(name)


def written(text: str) -> str:
    """The text of a page with every block as it must be."""

    def block(found: re.Match) -> str:
        kind, name = found[1], found[2]
        return f"<!-- {kind}: {name} -->\n{content(kind, name)}\n<!-- end -->"

    return BLOCK.sub(block, text)


def main() -> None:
    for path in pages():
        before = path.read_text()
        after = written(before)
        if after != before:
            path.write_text(after)
            print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
