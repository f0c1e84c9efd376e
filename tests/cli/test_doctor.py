"""`doctor`: on this machine, and on machines made up: a GPU of every kind, a wheel that fits or
not."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner  # noqa: E402

import dgmoe_ops  # noqa: E402
from dgmoe_ops import config  # noqa: E402
from dgmoe_ops.analysis import diagnosis, machine  # noqa: E402
from dgmoe_ops.backends.deep_gemm import WHEELS  # noqa: E402
from dgmoe_ops.cli import doctor  # noqa: E402
from dgmoe_ops.cli.main import main  # noqa: E402

BOTH = ("_C.abi3.so", "_C_cuda.abi3.so")
RELEASE, PINS = WHEELS[(2, 13)]
SETTINGS = (
    machine.Setting("DGMOE_LAYOUT", "auto", "auto", None),
    machine.Setting("DGMOE_MASKED_MEMORY_FRACTION", "0.25", "0.25", None),
)


def made_up(arch: int | None = 90, **facts: object) -> machine.Machine:
    """A machine on which everything is right, but for `facts`."""
    devices = () if arch is None else (machine.Device("NVIDIA Something", arch, 150 << 30),)
    whole = machine.Machine(
        python="3.12.1",
        torch="2.13.0+cu130",
        torch_cuda="13.0",
        devices=devices,
        driver=arch is not None,
        libraries=BOTH,
        deep_gemm=f"sgl-deep-gemm {RELEASE}",
        triton="3.6.0",
        pins={pin: pin.split("==")[1] for pin in PINS},
        nvcc="/usr/local/cuda/bin/nvcc",
        nvcc_version="13.0",
        jit_cache="/somewhere/kernels",
        jit_kernels=12,
        jit_compiler="nvcc",
        settings=SETTINGS,
    )
    return dataclasses.replace(whole, **facts)


def run_on(found: machine.Machine, monkeypatch: pytest.MonkeyPatch, *flags: str):
    monkeypatch.setattr(doctor, "look", lambda: found)
    return CliRunner().invoke(main, ["doctor", *flags])


# ---- this machine ----


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in config.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    before = "deep_gemm" in sys.modules
    done = CliRunner().invoke(main, ["doctor", "--json"])
    assert ("deep_gemm" in sys.modules) == before, "doctor must not import the GEMM library"
    found = json.loads(done.output)
    assert done.exit_code == (0 if found["can_run"] else 1)
    assert found["torch"] == torch.__version__
    assert tuple(found["libraries"]) == dgmoe_ops.LIBRARIES
    assert len(found["devices"]) == torch.cuda.device_count()
    cpu = [row for row in found["backends"] if row["device"] == "CPU"]
    assert len(cpu) == 8 and all(row["backend"].startswith("CPU kernel") for row in cpu)
    if not found["devices"]:
        assert done.exit_code == 0
    assert CliRunner().invoke(main, ["doctor"]).exit_code == done.exit_code


def test_every_variable_of_config_is_shown() -> None:
    source = Path(config.__file__).read_text()
    named = set(re.findall(r"DGMOE_[A-Z_]*[A-Z]", source))
    assert {variable.name for variable in config.VARIABLES} == named
    assert {setting.name for setting in machine.read_settings()} == named


@pytest.mark.parametrize("variable", config.VARIABLES, ids=lambda variable: variable.name)
def test_defaults_are_what_unset_variables_read(variable, monkeypatch) -> None:
    monkeypatch.delenv(variable.name, raising=False)
    unset = variable.read()
    monkeypatch.setenv(variable.name, variable.default)
    assert variable.read() == unset


def test_a_setting_without_a_legal_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGMOE_MASKED_MEMORY_FRACTION", "7")
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1
    assert "DGMOE_MASKED_MEMORY_FRACTION must be in (0, 1], got '7'" in done.output
    assert "unset DGMOE_MASKED_MEMORY_FRACTION" in done.output


# ---- trying the library ----


def test_prove_without_a_gpu_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)  # other tests may import it
    done = run_on(made_up(None), monkeypatch, "--prove", "--json")
    assert json.loads(done.output)["deep_gemm"]["proof"] == "not tried: no GPU"
    assert "deep_gemm" not in sys.modules


@pytest.mark.parametrize("fails", [False, True])
def test_prove_overrules_versions(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def prove_fit(device: str) -> None:
        if fails:
            raise RuntimeError("found this [1], your torch needs that")

    monkeypatch.setattr(doctor.deep_gemm, "prove_fit", prove_fit)
    found = made_up(90, deep_gemm="deep-gemm 2.5.0", pins={})
    done = run_on(found, monkeypatch, "--prove", "--json")
    document = json.loads(done.output)
    assert document["deep_gemm"]["fits"] is not fails
    assert done.exit_code == int(fails) and document["can_run"] is not fails
    shown = run_on(found, monkeypatch, "--prove").output
    assert ("found this [1]" if fails else "a product of known result") in shown


# ---- machines made up ----


@pytest.mark.parametrize("arch", [90, 100, 103, 120, 121, None])
def test_a_whole_machine_runs(arch: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made_up(arch)
    assert diagnosis.problems(found) == ()
    done = run_on(found, monkeypatch)
    assert done.exit_code == 0
    assert ("on a GPU" if arch else "on the CPU") in done.output


@pytest.mark.parametrize(
    ("arch", "recipe", "layout", "backend"),
    [
        (90, "bf16", "masked", "DeepGEMM"),
        (90, "fp8_block", "contig", "DeepGEMM, scales block_fp32"),
        (90, "mxfp8", "masked", "CUDA kernel, scales packed_ue8m0"),
        (90, "mxfp4", "contig", "CUDA kernel, scales packed_ue8m0"),
        (103, "fp8_block", "masked", "DeepGEMM, scales packed_ue8m0"),
        (100, "mxfp4", "masked", "DeepGEMM, scales packed_ue8m0"),
        (120, "mxfp4", "contig", "DeepGEMM, scales packed_ue8m0"),
        (120, "mxfp8", "contig", "- (SM120 does not run it)"),
        (120, "fp8_block", "contig", "DeepGEMM, scales packed_ue8m0"),
        (120, "fp8_block", "masked", "- (SM120 does not run it)"),
        (110, "bf16", "contig", "- (SM110 does not run it)"),
        (80, "bf16", "contig", "- (SM80 does not run it)"),
    ],
)
def test_the_table_of_backends(arch: int, recipe: str, layout: str, backend: str) -> None:
    rows = {
        (r["device"], r["recipe"], r["layout"]): r["backend"]
        for r in diagnosis.table(made_up(arch))
    }
    assert rows[f"SM{arch}", recipe, layout] == backend
    assert rows["CPU", recipe, layout].startswith("CPU kernel")


def test_the_guide_shows_the_table_of_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    output = run_on(made_up(90), monkeypatch).output
    table = output[output.index("What runs the grouped GEMMs") : output.index("The layer can run")]
    shown = "\n".join(line.rstrip() for line in table.splitlines())
    guide = Path(__file__).parents[2] / "docs" / "guide" / "command_line.md"
    assert shown in guide.read_text()


@pytest.mark.parametrize(
    ("facts", "what", "fix"),
    [
        (
            {"deep_gemm": None, "pins": {PINS[0]: None}},
            "found none",
            f"pip install sgl-deep-gemm=={RELEASE} {PINS[0]}",
        ),
        ({"deep_gemm": "sgl-deep-gemm 0.1.5"}, "found sgl-deep-gemm 0.1.5", "pip install sgl-"),
        ({"pins": {PINS[0]: "0.1.2"}}, "with apache-tvm-ffi 0.1.2", PINS[0]),
        ({"libraries": BOTH[:1]}, "_C_cuda.abi3.so is not built", "pip install --no-build-iso"),
        ({"torch": "2.12.0", "deep_gemm": None, "pins": {}}, "no DeepGEMM wheel is known", "2.13"),
    ],
)
def test_what_is_missing_is_named_with_its_fix(facts, what, fix, monkeypatch) -> None:
    found = made_up(90, **facts)
    (problem,) = diagnosis.problems(found)
    assert what in problem.what and fix in problem.fix and problem.blocks
    done = run_on(found, monkeypatch)
    assert done.exit_code == 1
    assert problem.what in done.output and problem.fix in done.output
    assert "cannot run here on a GPU" in done.output


def test_notes_do_not_stop_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, what, fix in (
        (made_up(90, nvcc=None, nvcc_version=None), "no nvcc", "CUDA_HOME=/usr/local/cuda"),
        (
            made_up(120, settings=(machine.Setting("DGMOE_LAYOUT", "auto", "masked", None),)),
            "SM120 runs layout contig only",
            "unset DGMOE_LAYOUT",
        ),
        (made_up(90, deep_gemm="deep-gemm 2.5.0"), "the DeepGEMM that fits", "pip install"),
        (
            made_up(90, triton=None),
            "SM90 runs mxfp4 and mxfp8 by kernels of dgmoe_ops, and by Triton, which is missing",
            "pip install triton",
        ),
        (
            made_up(None, driver=True, torch="2.13.0+cpu", torch_cuda=None),
            "a build without CUDA",
            "pip install torch",
        ),
        (made_up(None, driver=True), "PyTorch sees no device", "nvidia-smi"),
    ):
        (problem,) = diagnosis.problems(found)
        assert what in problem.what and fix in problem.fix and not problem.blocks
        assert run_on(found, monkeypatch).exit_code == 0


def test_deep_gemm_is_missed_where_it_runs() -> None:
    found = made_up(90, deep_gemm=None, pins={})
    assert "missing" in diagnosis.backend(found, 90, "bf16", "masked")
    assert diagnosis.backend(found, 90, "mxfp4", "masked").startswith("CUDA kernel")
    assert not diagnosis.can_run(found)


def test_triton_is_missed_nowhere() -> None:
    """What needs it is a rest on SM90, and nothing elsewhere."""
    without = made_up(90, triton=None)
    assert diagnosis.table(without) == diagnosis.table(made_up(90))
    assert diagnosis.can_run(without)
    assert diagnosis.problems(made_up(100, triton=None)) == ()


@pytest.mark.parametrize("arch", [80, 110])
def test_a_gpu_without_grouped_gemms_is_said_to_have_none(arch: int, monkeypatch) -> None:
    found = made_up(arch)
    (problem,) = diagnosis.problems(found)
    assert f"no grouped GEMM exists for SM{arch}" in problem.what
    assert run_on(found, monkeypatch).exit_code == 1


def test_one_good_gpu_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = (machine.Device("old", 80, 1 << 30), machine.Device("new", 90, 1 << 30))
    assert run_on(made_up(90, devices=devices), monkeypatch).exit_code == 0


@pytest.mark.parametrize(
    ("facts", "fits"),
    [
        ({}, True),
        ({"deep_gemm": None}, False),
        ({"deep_gemm": "sgl-deep-gemm 0.1.5"}, False),
        ({"deep_gemm": "deep-gemm 2.5.0"}, None),
        ({"torch": "2.12.0"}, None),
    ],
)
def test_whether_the_wheel_fits(facts: dict, fits: bool | None, monkeypatch) -> None:
    found = made_up(90, **facts)
    assert diagnosis.deep_gemm_fits(found) is fits
    assert json.loads(run_on(found, monkeypatch, "--json").output)["deep_gemm"]["fits"] is fits
