"""`warmup`: what a dry run lists, and what it says where nothing can run."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner  # noqa: E402

from dgmoe_ops import LayerShape, plan_warmup  # noqa: E402
from dgmoe_ops.cli.main import main  # noqa: E402

SIZES = ["--experts", "8", "--hidden", "300", "--intermediate", "128", "--top-k", "2"]
SHAPE = LayerShape(8, 300, 128, 2, "fp8_block", 8)


def invoke(*flags: str):
    return CliRunner().invoke(main, ["warmup", *SIZES, *flags])


@pytest.mark.parametrize(
    ("text", "tokens"), [("1,8,32", [1, 8, 32]), ("1:512", (1, 512)), ("7", [7])]
)
def test_a_dry_run_lists_the_plan(text: str, tokens) -> None:
    done = invoke("--tokens", text, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    calls = plan_warmup(SHAPE, tokens=tokens)
    assert document["calls"] == [call.facts() for call in calls]
    assert document["layer"]["hidden"] == 300
    shown = invoke("--tokens", text, "--dry-run").output
    assert f"{len(calls)} calls" in shown
    assert shown.count("grouped_gemm_nt_f8f8bf16_masked") == sum(call.spec.masked for call in calls)


def test_one_layout_and_the_experts_of_a_rank() -> None:
    done = invoke(
        "--tokens", "64", "--layout", "masked", "--local-experts", "2", "--dry-run", "--json"
    )
    calls = json.loads(done.output)["calls"]
    assert {(call["op"], call["experts"], call["expected_m"]) for call in calls} == {
        ("grouped_gemm_nt_f8f8bf16_masked", 2, 16)
    }


@pytest.mark.parametrize("text", ["", "a", "1:", "5:1", "-1", "1,-2", "1:2:3", "-3:5"])
def test_token_counts_that_are_none(text: str) -> None:
    done = invoke("--tokens", text, "--dry-run")
    assert done.exit_code == 2 and "--tokens" in done.output


def test_sizes_that_contradict_each_other() -> None:
    done = invoke("--tokens", "1", "--local-experts", "9", "--dry-run")
    assert done.exit_code == 2 and "--local-experts 9 is more than --experts 8" in done.output
    done = invoke("--tokens", "1", "--top-k", "9", "--dry-run")
    assert done.exit_code == 2 and "--top-k 9 is more than --experts 8" in done.output


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("--tokens", "1")
    assert done.exit_code == 1
    assert "device cuda needs a GPU and a CUDA PyTorch" in done.output
    assert "Traceback" not in done.output
    done = invoke("--tokens", "1", "--device", "cpu")
    assert done.exit_code == 0 and "need no warm-up" in done.output
    done = CliRunner().invoke(
        main, ["warmup", *SIZES, "--tokens", "1", "--device", "cpu", "--json"]
    )
    assert json.loads(done.stdout)["calls"] == 0
