"""Counts of test reports, sanitizer logs and approximate activations, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner  # noqa: E402

from benchmarks import evidence  # noqa: E402
from docs.scripts import results  # noqa: E402

REPORT = """<testsuites><testsuite tests="6">
<testcase name="a"/><testcase name="b"/>
<testcase name="c"><failure message="no"/></testcase>
<testcase name="d"><error message="no"/></testcase>
<testcase name="e"><skipped type="pytest.skip" message="needs two GPUs"/></testcase>
<testcase name="f"><skipped type="pytest.skip" message="needs two GPUs"/></testcase>
<testcase name="g"><skipped type="pytest.skip" message="needs SM100"/></testcase>
</testsuite></testsuites>"""
LOG = """========= COMPUTE-SANITIZER
align_scale: 12 samples
grouped_gemm_nt_f8f8bf16_masked: 30 MX products
========= ERROR SUMMARY: 2 errors
"""


def test_suite(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(REPORT)
    arguments = ["suite", str(report), str(report), "--device", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(evidence.main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    path = tmp_path / "cuda_suite_cpu.json"
    document = json.loads(path.read_text())
    assert document["counts"] == {"passed": 4, "failed": 2, "errors": 2, "skipped": 6}
    assert document["skipped"] == [
        {"tests": 4, "reason": "needs two GPUs"},
        {"tests": 2, "reason": "needs SM100"},
    ]
    table = results.suite_table(path)
    assert "4 passed, 2 failed, 2 errors, 6 skipped" in table
    assert table.endswith("| 4 | needs two GPUs |\n| 2 | needs SM100 |")


def test_sanitizers(tmp_path: Path) -> None:
    (tmp_path / "memcheck.log").write_text(LOG)
    race = LOG.replace("ERROR SUMMARY: 2 errors", "RACECHECK SUMMARY: 0 hazards displayed")
    (tmp_path / "racecheck.log").write_text(race)
    logs = [str(tmp_path / f"{tool}.log") for tool in ("memcheck", "racecheck")]
    arguments = ["sanitizers", *logs, "--device", "cpu", "--out", str(tmp_path)]
    CliRunner().invoke(evidence.main, arguments, catch_exceptions=False)
    path = tmp_path / "sanitizers_cpu.json"
    rows = json.loads(path.read_text())["rows"]
    row = {"tool": "memcheck", "ops": 2, "calls": 42, "MX products": 30, "findings": 2}
    assert rows == [row, {**row, "tool": "racecheck", "findings": 0}]
    assert "| memcheck | 42 | 30 | 2 |" in results.sanitizers_table(path)


def test_a_sanitizer_that_did_not_finish_is_no_result() -> None:
    with pytest.raises(ValueError, match="the log of memcheck has no summary"):
        evidence.read_sanitizer("memcheck", "align_scale: 12 samples\n")


def test_approximate(tmp_path: Path) -> None:
    arguments = ["approximate", "--device", "cpu", "--rows", "5", "--columns", "200"]
    done = CliRunner().invoke(
        evidence.main, [*arguments, "--out", str(tmp_path)], catch_exceptions=False
    )
    assert done.exit_code == 0
    path = tmp_path / "approximate_activation_cpu.json"
    rows = json.loads(path.read_text())["rows"]
    assert [row["scales"] for row in rows] == ["fp32", "UE8M0"] * len(evidence.ACTIVATIONS)
    for row in rows:  # a CPU approximates nothing
        assert (row["values"], row["groups"]) == (1000, 10)
        assert row["one step"] == row["further"] == row["other scale"] == 0
    assert "| situ | UE8M0 | 1,000 | 0 | 0 | 0 of 10 |" in results.approximate_table(path)


def test_doctor(tmp_path: Path) -> None:
    arguments = ["doctor", "--device", "cpu", "--out", str(tmp_path)]
    assert CliRunner().invoke(evidence.main, arguments, catch_exceptions=False).exit_code == 0
    text = (tmp_path / "doctor_cpu.txt").read_text()
    assert text.startswith("$ python -m dgmoe_ops doctor --prove\nThis machine\n")
    assert str(Path.home()) not in text


def test_values_and_groups_that_moved_are_counted() -> None:
    code = torch.full((2, 256), 0x40, dtype=torch.uint8)
    other = code.clone()
    other[0, 3], other[0, 4], other[1, 200] = 0x41, 0x43, 0x41
    scale = torch.ones(2, 2)
    moved = scale.clone()
    moved[1, 1] = 2.0  # its values are not compared
    f8 = torch.float8_e4m3fn
    found = evidence.compare_quantised((other.view(f8), moved), (code.view(f8), scale))
    want = {"values": 512, "one step": 1, "further": 1, "groups": 4, "other scale": 1}
    assert found == want


def test_the_variable_is_put_back(monkeypatch) -> None:
    import os

    for before in ("1", None):
        if before is None:
            monkeypatch.delenv("DGMOE_EXACT_ACTIVATION", raising=False)
        else:
            monkeypatch.setenv("DGMOE_EXACT_ACTIVATION", before)
        with evidence.exact(before is None):
            assert os.environ["DGMOE_EXACT_ACTIVATION"] == ("1" if before is None else "0")
        assert os.environ.get("DGMOE_EXACT_ACTIVATION") == before
