"""The README quotes committed results, not memories of them."""

from pathlib import Path

from benchmarks.readme import (
    HOST_RESULT,
    PREFILL_RESULT,
    RESULT,
    host_table,
    ops_table,
    recipes_table,
    speed_table,
)

README = Path(__file__).parent.parent.parent / "README.md"


def test_speed_tables_are_those_of_the_committed_result() -> None:
    text = README.read_text()
    assert speed_table() in text
    assert speed_table(column="eager us") in text


def test_host_table_is_that_of_the_committed_result() -> None:
    assert host_table() in README.read_text()


def test_ops_table_is_that_of_the_committed_result() -> None:
    assert ops_table() in README.read_text()


def test_recipes_tables_are_those_of_the_committed_results() -> None:
    text = README.read_text()
    assert recipes_table() in text
    assert recipes_table(PREFILL_RESULT) in text


def test_the_result_says_where_it_comes_from() -> None:
    text = RESULT.with_suffix(".md").read_text()
    assert "- deep_gemm: " in HOST_RESULT.with_suffix(".md").read_text()
    for name in ("device", "driver", "torch", "triton", "deep_gemm", "sglang", "date", "command"):
        assert f"- {name}: " in text
