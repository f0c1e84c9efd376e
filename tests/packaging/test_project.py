"""What pyproject.toml and setup.py say, held to the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dgmoe_ops.backends.deep_gemm.versions import WHEELS

ROOT = Path(__file__).parents[2]

SETUP = """
import runpy, sys, types
{before}
sys.argv = ["setup.py", "--version"]
runpy.run_path("setup.py", run_name="__main__")
"""


def project() -> dict:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_an_extra_pins_each_deep_gemm() -> None:
    extras = project()["optional-dependencies"]
    wanted = {
        f"deepgemm-torch{major}{minor}": [
            f"torch=={major}.{minor}.*",
            f"sgl-deep-gemm=={release}",
            *pins,
        ]
        for (major, minor), (release, pins) in WHEELS.items()
    }
    assert {name: extras[name] for name in extras if name.startswith("deepgemm")} == wanted


def test_what_is_shipped_is_named() -> None:
    said = project()
    assert said["license"] == "Apache-2.0" and said["license-files"] == ["LICENSE"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert "urls" not in said
    assert (ROOT / "dgmoe_ops" / "py.typed").exists()


@pytest.mark.parametrize(
    ("before", "got"),
    [
        ("sys.modules['torch'] = None", "none"),
        ("sys.modules['torch'] = types.SimpleNamespace(__version__='2.11.0+cu130')", "none"),
    ],
)
def test_a_build_without_torch_says_one_sentence(before: str, got: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETUP.format(before=before)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"dgmoe_ops: building needs PyTorch 2.13 or newer, got {got}; install it"
    )
    assert done.stderr.count("\n") == 1


def test_a_build_with_an_old_torch_says_one_sentence() -> None:
    before = "import torch; torch.__version__ = '2.11.0+cu130'"
    done = subprocess.run(
        [sys.executable, "-c", SETUP.format(before=before)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "PyTorch 2.13 or newer, got 2.11.0+cu130; install it" in done.stderr
    assert done.stderr.count("\n") == 1
