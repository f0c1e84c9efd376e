"""README.md and docs/ show what code and committed results say, and the README stays short."""

from __future__ import annotations

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from docs.scripts import blocks, results  # noqa: E402
from docs.scripts.tables import TABLES  # noqa: E402

PAGES = blocks.pages()
README_LINES = 200


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(blocks.ROOT)))
def test_blocks_are_what_would_be_written_now(path) -> None:
    for found in blocks.BLOCK.finditer(path.read_text()):
        kind, name = found[1], found[2]
        want = f"<!-- {kind}: {name} -->\n{blocks.content(kind, name)}\n<!-- end -->"
        assert found[0] == want, f"stale: {name}; `make docs-tables` writes it again"


def test_every_table_is_shown_and_every_block_is_closed() -> None:
    texts = [path.read_text() for path in PAGES]
    shown = {name for text in texts for kind, name in blocks.blocks(text) if kind == "table"}
    assert shown == set(TABLES)
    for path, text in zip(PAGES, texts, strict=True):
        opened = text.count("<!-- table: ") + text.count("<!-- output: ")
        found = len(list(blocks.blocks(text)))
        assert opened == text.count("<!-- end -->") == found, path


def test_the_readme_is_short() -> None:
    lines = len((blocks.ROOT / "README.md").read_text().splitlines())
    assert lines <= README_LINES, f"README.md has {lines} lines; details belong to docs/"


def test_results_say_where_they_come_from() -> None:
    for result in (results.RESULT, results.EAGER_RESULT, results.RECIPES_RESULT):
        text = result.with_suffix(".md").read_text()
        for name in ("device", "driver", "torch", "triton", "deep_gemm", "date", "command"):
            assert f"- {name}: " in text, f"{result.name}: {name}"


def test_a_summary_is_made_of_its_rows() -> None:
    """By hand, from a result of one call."""
    rows = [
        {"layer": "dgmoe", "layout": "auto", "total us": 100.0},
        {"layer": "sglang", "layout": "masked", "total us": 130.0},
        {"layer": "sglang", "layout": "contig", "total us": 125.0},
        {"layer": "sglang", "layout": "triton as shipped", "total us": None},
        {"layer": "sglang", "layout": "triton best", "total us": 80.0},
    ]
    rows = [{"shape": "s", "T": 4, "recipe": "fp8_block", "floor us": 50.0, **row} for row in rows]
    path = _written({"rows": rows})
    assert results.summary_table(path).endswith("| s | 4 | 100 | 125 | 80.0 | 50.0 |")
    assert results.ratio_table(path).endswith("| 4 | 0.80 | 1.25 |")


class _written:
    """A result in memory, read as a file is."""

    def __init__(self, document: dict) -> None:
        import json

        self.text = json.dumps(document)

    def read_text(self) -> str:
        return self.text
