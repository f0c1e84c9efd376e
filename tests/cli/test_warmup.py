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


@pytest.mark.parametrize(
    "text",
    ["", "a", "1:", "5:1", "-1", "1,-2", "1:2:3", "-3:5", "1:1000000000", "262145", "1,2147483648"]
    + ["9" * 5000, ":", ",", "1,,2", "1.5"],
)
def test_token_counts_that_are_none(text: str) -> None:
    done = invoke("--tokens", text, "--dry-run")
    assert done.exit_code == 2 and "--tokens" in done.output


@pytest.mark.parametrize(
    ("option", "low", "high"),
    [
        ("--experts", 1, 2**14),
        ("--local-experts", 1, 2**14),
        ("--hidden", 1, 2**18),
        ("--intermediate", 1, 2**18),
        ("--top-k", 1, 2**10),
        ("--alignment", 1, 2**14),
        ("--lock-timeout", 0, 604800),
    ],
)
def test_sizes_have_bounds_and_help_says_them(option: str, low: int, high: int) -> None:
    shown = " ".join(CliRunner().invoke(main, ["warmup", "--help"]).output.split())
    assert f"{low}<=x<={high}" in shown and "each 0 to 262144" in shown
    for value in (low - 1, high + 1, 2**31 - 1, 2**63):
        done = invoke("--tokens", "1", option, str(value), "--dry-run")
        assert done.exit_code == 2 and f"is not in the range {low}<=x<={high}" in done.output


def test_a_long_span_is_listed() -> None:
    arguments = ["--tokens", "0:65536", "--dry-run", "--layout", "masked"]
    done = invoke(*arguments, "--json")
    calls = json.loads(done.output)["calls"]
    assert len(calls) == 2 * 65536 // 4  # 2 of 8 experts a token: a hint for each four tokens
    shown = invoke(*arguments).output
    assert f"{len(calls)} calls" in shown and f"and {len(calls) - 1000} more" in shown
    assert shown.count("grouped_gemm_nt_f8f8bf16_masked") == 1000


def test_errors_are_json_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def error_of(*flags: str) -> dict:
        done = invoke(*flags, "--json")
        assert done.stderr == ""
        (key,) = found = json.loads(done.stdout)
        assert key == "error" and found[key]["exit_code"] == done.exit_code
        return found[key]

    assert error_of("--tokens", "1:1000000000") == {
        "message": "Invalid value for '--tokens': counts must be from 0 to 262144, got 1000000000",
        "exit_code": 2,
    }
    assert error_of()["exit_code"] == 2  # without --tokens
    assert error_of("--tokens", "1", "--cache-dir", "")["exit_code"] == 2
    assert error_of("--tokens", "1", "--top-k", "9")["exit_code"] == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = error_of("--tokens", "1")
    assert said["exit_code"] == 1 and "device cuda needs a GPU" in said["message"]
    for name in ("nonsense", "meta"):
        assert error_of("--tokens", "1", "--device", name)["exit_code"] == 1


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
