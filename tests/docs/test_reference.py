"""The generated pages of the reference hold every op, every public name and every variable."""

from __future__ import annotations

import dgmoe_ops
from dgmoe_ops import config
from docs.scripts import reference


def test_every_op_has_a_row_and_a_section() -> None:
    pages = reference.pages()
    rows = [line for line in reference.ops_index().splitlines() if line.startswith("| [`")]
    assert [row.count("|") for row in rows] == [4] * len(reference.ops())
    for op in reference.ops():
        page = pages[f"reference/ops/{reference.room_of(op)}.md"]
        assert f"## `{op}` {{ #{op} }}" in page
        assert f"dgmoe::{op}(" in page, "its schema"


def test_every_public_name_is_placed() -> None:
    assert reference.unplaced() == []
    pages = "\n".join(reference.pages().values())
    for name in dgmoe_ops.__all__:
        known = name in reference.MODULES or name == "LIBRARIES"
        assert known or f"::: dgmoe_ops.{name}\n" in pages, name


def test_every_function_beside_the_ops_is_placed() -> None:
    pages = "\n".join(reference.pages().values())
    for name in dgmoe_ops.ops.__all__:
        documented = f"::: dgmoe_ops.ops.{name}\n" in pages
        assert documented or hasattr(dgmoe_ops, name), name


def test_a_name_without_a_page_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(dgmoe_ops, "__all__", [*dgmoe_ops.__all__, "forgotten"])
    assert reference.unplaced() == ["forgotten"]


def test_every_variable_is_documented() -> None:
    page = reference.pages()["reference/environment.md"]
    for variable in config.VARIABLES:
        assert f"## `{variable.name}`\n\nDefault: `{variable.default}`" in page


def test_a_contract_is_its_comment() -> None:
    room, text = reference.contract("pack_ue8m0")
    assert room == "scale" and text.startswith("pack_ue8m0: ") and "#pragma" not in text
    assert reference.contract("no_such_op") is None and reference.room_of("no_such_op") is None
