"""The benchmarks run: every op has an entry, the CLI writes both files, the floor is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("click")
pytest.importorskip("rich")
sys.path.insert(0, str(Path(__file__).parents[2]))

from click.testing import CliRunner  # noqa: E402

from benchmarks import bench, bench_layer, bench_ops, layers, shapes  # noqa: E402
from benchmarks.inputs import fp8_weights, layer_inputs  # noqa: E402
from benchmarks.report import Report  # noqa: E402
from dgmoe_ops import ops  # noqa: E402
from dgmoe_ops.analysis.gpus import GPUS, gpu_of  # noqa: E402

CPU = torch.device("cpu")
H200 = GPUS["H200"]


def _run(arguments: list[str]):
    return CliRunner().invoke(bench.main, arguments, catch_exceptions=False)


def test_every_op_has_an_entry_in_its_room():
    entries = {op: room for room, builders in bench_ops.ROOMS.items() for op in builders}
    assert set(entries) == {name for name in ops.__all__ if hasattr(torch.ops.dgmoe, name)}
    for op, room in entries.items():
        assert getattr(ops, op).__module__ == f"dgmoe_ops.ops.{room}"


def test_ops_writes_both_files(tmp_path):
    files = [tmp_path / "ops.json", tmp_path / "ops.md"]
    done = _run(
        ["ops", "--device", "cpu", "--shapes", "tiny", "--tokens", "3"]
        + ["--json", str(files[0]), "--markdown", str(files[1])]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(files[0].read_text())
    assert [row["op"] for row in document["rows"]] == [
        op for builders in bench_ops.ROOMS.values() for op in builders
    ]
    for row in document["rows"]:
        assert "note" not in row, row
        assert row["us"] > 0
        assert row["bytes"] > 0
    assert {"device", "driver", "torch", "triton", "deep_gemm", "sglang", "date", "command"} <= set(
        document["meta"]
    )
    table = [line for line in files[1].read_text().splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(document["rows"])
    assert {line.count("|") for line in table} == {len(bench_ops.COLUMNS) + 1}


def test_layer_is_right_and_writes_both_files(tmp_path):
    files = [tmp_path / "layer.json", tmp_path / "layer.md"]
    done = _run(
        ["layer", "--device", "cpu", "--shapes", "tiny", "--tokens", "3"]
        + ["--recipes", "fp8_block,bf16"]
        + ["--json", str(files[0]), "--markdown", str(files[1])]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(files[0].read_text())["rows"]
    assert [(row["recipe"], row["layout"]) for row in rows] == [
        (recipe, layout)
        for recipe in ("fp8_block", "bf16")
        for layout in ("masked", "contig", "auto")
    ]
    for row in rows:
        assert row["error"] < bench_layer.TOLERANCE[row["recipe"]]
        assert row["total us"] > 0
    assert files[1].read_text().count("\n| tiny |") == len(rows)


def test_a_spent_budget_skips_rows_and_says_so(tmp_path):
    file = tmp_path / "ops.json"
    done = _run(
        ["ops", "--shapes", "tiny", "--tokens", "1", "--room", "scale"]
        + ["--budget-seconds", "1e-9", "--json", str(file)]
    )
    assert done.exit_code == 0, done.output
    notes = {row["note"] for row in json.loads(file.read_text())["rows"]}
    assert notes == {"skipped: out of time"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["ops", "--shapes", "no-such-model"],
        ["ops", "--tokens", "1,two"],
        ["ops", "--op", "no_such_op"],
        ["layer", "--recipes", "fp7"],
    ],
)
def test_wrong_arguments_are_named(arguments):
    done = _run(arguments)
    assert done.exit_code == 2
    assert arguments[-1].split(",")[-1] in done.output


def test_a_wrong_layer_is_not_timed(monkeypatch, tmp_path):
    right = layers.fused
    monkeypatch.setattr(
        bench_layer, "fused", lambda layout, inputs, weights: 1.1 * right(layout, inputs, weights)
    )
    file = tmp_path / "layer.json"
    done = _run(["layer", "--shapes", "tiny", "--tokens", "1", "--json", str(file)])
    assert done.exit_code == 1
    for row in json.loads(file.read_text())["rows"]:
        assert row["note"] == "wrong result, not timed"
        assert "total us" not in row


def test_floor_by_hand():
    # Eight experts of 3 * 7168 * 2048 bytes at 4.8 TB/s.
    v3 = shapes.SHAPES["deepseek-v3"]
    assert shapes.floor_us(v3, 8, 8, H200) == pytest.approx(73.4, abs=0.05)
    # 65536 rows of 2 * 3 * 7168 * 2048 operations at 1979 TFLOP/s outlast the bytes.
    assert shapes.floor_us(v3, 256, 65536, H200) == pytest.approx(2916.8, abs=0.5)
    # Twice the bytes in bf16.
    assert shapes.floor_us(v3, 8, 8, H200, "bf16") == pytest.approx(146.8, abs=0.05)
    ids = torch.tensor([[0, 1], [1, 2]])
    expected = shapes.floor_us(shapes.SHAPES["tiny"], 3, 4, H200)
    assert shapes.routing_floor_us(shapes.SHAPES["tiny"], ids, H200) == expected


def test_rates_are_looked_up_by_the_longest_name():
    assert H200.fp8_flops == 1979e12
    assert gpu_of("NVIDIA H200 NVL").fp8_flops == 1671e12
    assert gpu_of("NVIDIA H200") is gpu_of("an NVIDIA H200, or part of it") is H200
    assert gpu_of("NVIDIA H100 80GB HBM3").hbm_bytes_per_s == 3.35e12
    assert gpu_of("NVIDIA H100 PCIe").hbm_bytes_per_s == 2.0e12
    assert gpu_of("NVIDIA GeForce GTX 1080") is None


def test_slab_bytes_by_hand():
    # GEMM2's input and output are the most: 256 experts * 8192 rows * (2048 + 2 * 7168) bytes.
    v3 = shapes.SHAPES["deepseek-v3"]
    assert bench_layer.slab_bytes(v3, 8192, "fp8_block") == 256 * 8192 * (2048 + 2 * 7168)


@pytest.mark.parametrize("layout", ["masked", "contig"])
def test_staged_and_fused_layers_give_the_same_bits(layout):
    tiny = shapes.SHAPES["tiny"]
    weights, inputs = fp8_weights(tiny, CPU), layer_inputs(tiny, 5, CPU)
    whole = layers.fused(layout, inputs, weights)
    assert torch.equal(layers.run_until(layers.staged(layout), "post", inputs, weights), whole)
    assert layers.run_until(layers.staged(layout), "act", inputs, weights) is None


def test_the_report_survives_pipes_and_missing_cells(tmp_path):
    report = Report("t", ("a", "b"), {"device": "cpu"}, [tmp_path / "sub" / "t.md"])
    report.add({"a": "x|y"})
    assert "| x/y | - |" in (tmp_path / "sub" / "t.md").read_text()
