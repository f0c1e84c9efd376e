"""The variables: what switches take, and that Python, the C++ library and the build agree on it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import CAN_BUILD

from dgmoe_ops import config

ON = ("1", "true", "on", "yes", "True", "ON", "yEs")
OFF = ("", "0", "false", "off", "no", "FALSE", "Off", "nO")
NEITHER = ("2", "-1", "01", " 1", "1 ", "maybe", "enable", "y", "t", "none", "true,", "trué")
SWITCHES = {
    "DGMOE_BATCH_INVARIANT": (config.batch_invariant, False),
    "DGMOE_SANITY_CHECK": (config.sanity_check, False),
    "DGMOE_NATIVE_CALLS": (config.native_calls, True),
    "DGMOE_EXACT_ACTIVATION": (config.exact_activation, False),
    "DGMOE_JIT_NVRTC": (config.jit_nvrtc, None),
}
SETUP = Path(__file__).parents[1] / "setup.py"


@pytest.mark.parametrize(("name", "read", "unset"), [(n, *rest) for n, rest in SWITCHES.items()])
def test_switches(monkeypatch, name, read, unset) -> None:
    monkeypatch.delenv(name, raising=False)
    assert read() is unset
    for text in (*ON, *OFF):
        monkeypatch.setenv(name, text)
        assert read() is (unset if text == "" else text in ON)
    for text in NEITHER:
        monkeypatch.setenv(name, text)
        with pytest.raises(
            ValueError, match=f"^{name} must be one of .*1, true, on, yes,"
        ) as error:
            read()
        assert f"got {text!r}" in str(error.value)


def test_every_variable_that_is_a_switch_is_tested() -> None:
    switches = {v.name for v in config.VARIABLES if v.default in ("0", "1")}
    assert switches | {"DGMOE_JIT_NVRTC"} == set(SWITCHES)


@pytest.mark.parametrize("variable", config.VARIABLES, ids=lambda variable: variable.name)
def test_the_empty_string_is_unset(monkeypatch, variable) -> None:
    monkeypatch.delenv(variable.name, raising=False)
    unset = variable.read()
    monkeypatch.setenv(variable.name, "")
    assert variable.read() == unset


def test_auto_in_any_case(monkeypatch) -> None:
    for text in ("auto", "AUTO"):
        monkeypatch.setenv("DGMOE_JIT_NVRTC", text)
        assert config.jit_nvrtc() is None
        monkeypatch.setenv("DGMOE_LAYOUT", text)
        assert config.layout_override() is None


# ---- the C++ library, which reads DGMOE_BATCH_INVARIANT itself ----

K = 512


def product(rows: int) -> torch.Tensor:
    """Many rows go to the machine's matrix product, unless a row's bits must not depend on their
    number."""
    g = torch.Generator().manual_seed(0)
    a = torch.randn(256, K, generator=g)[:rows].bfloat16().contiguous()
    b = torch.randn(1, 64, K, generator=g).bfloat16()
    where = torch.zeros(rows, dtype=torch.int32)
    return torch.ops.dgmoe.grouped_gemm_nt_bf16_contig(a, b, where)


@pytest.mark.parametrize("text", [*ON, *OFF])
def test_the_library_reads_switches_alike(monkeypatch, text) -> None:
    monkeypatch.setenv("DGMOE_BATCH_INVARIANT", "1")
    invariant = product(256)
    monkeypatch.setenv("DGMOE_BATCH_INVARIANT", "0")
    dense = product(256)
    assert not torch.equal(invariant, dense)
    monkeypatch.setenv("DGMOE_BATCH_INVARIANT", text)
    assert torch.equal(product(256), invariant if config.batch_invariant() else dense)


@pytest.mark.parametrize("text", NEITHER)
@pytest.mark.parametrize("rows", [0, 1, 256])
def test_the_library_refuses_what_python_refuses(monkeypatch, text, rows) -> None:
    monkeypatch.setenv("DGMOE_BATCH_INVARIANT", text)
    with pytest.raises(ValueError, match="DGMOE_BATCH_INVARIANT") as theirs:
        product(rows)
    with pytest.raises(ValueError) as ours:
        config.batch_invariant()
    assert str(ours.value) in str(theirs.value)


# ---- the build ----


builds = pytest.mark.skipif(not CAN_BUILD, reason="setup.py refuses this PyTorch first")


@builds
def test_the_build_without_cuda() -> None:
    assert asked_for_nvcc("False").stdout.splitlines()[-1] == "None"


@builds
def test_the_build_refuses_what_is_neither() -> None:
    done = asked_for_nvcc("maybe")
    assert done.returncode != 0
    assert "DGMOE_CUDA must be one of 1, true, on, yes, 0, false, off, no, got" in done.stderr


def asked_for_nvcc(text: str) -> subprocess.CompletedProcess:
    """What setup.py answers for the toolkit; its last call, which would build, is left out."""
    code = (
        "import sys, setuptools; setuptools.setup = lambda **k: None; import runpy;"
        f"print(runpy.run_path({str(SETUP)!r})['cuda_home']())"
    )
    environment = {**os.environ, "DGMOE_CUDA": text}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


def test_config_needs_no_library() -> None:
    assert runpy.run_path(config.__file__)["VARIABLES"]
