"""Builds the numpy binding of the headers once a test run; ninja skips it where nothing changed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import numpy as np
import pybind11
import pytest
from filelock import FileLock

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"

# The flags that matter for the numbers are those of setup.py.
BUILD = """\
cxx = {cxx}
flags = -O2 -std=c++17 -ffp-contract=off -fPIC -fvisibility=hidden -Wall {includes}
rule compile
  command = $cxx $flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
rule link
  command = $cxx -shared $in -o $out
build numerics_bind.o: compile {source}
build {library}: link numerics_bind.o
default {library}
"""


@pytest.fixture(scope="session")
def numerics(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ModuleType:
    """The functions of numerics.h and layout.h over numpy arrays; floats travel as their bits."""
    cxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if cxx is None:
        pytest.skip("no C++ compiler")
    cache = getattr(request.config, "cache", None)  # none with -p no:cacheprovider
    folder = cache.mkdir("numerics_bind") if cache else tmp_path_factory.mktemp("numerics_bind")
    library = "numerics_bind" + sysconfig.get_config_var("EXT_SUFFIX")
    folders = [CSRC / "common", pybind11.get_include(), sysconfig.get_paths()["include"]]
    includes = " ".join(f"-I{folder}" for folder in folders)
    source = HERE / "numerics_bind.cpp"
    text = BUILD.format(cxx=cxx, includes=includes, source=source, library=library)
    (folder / "build.ninja").write_text(text)
    ninja = shutil.which("ninja") or "ninja"
    with FileLock(folder / "lock"):  # several pytest workers share the folder
        done = subprocess.run([ninja, "-C", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    spec = importlib.util.spec_from_file_location("numerics_bind", folder / library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def all_bf16() -> np.ndarray:
    """The bits of every bfloat16 value."""
    return np.arange(1 << 16, dtype=np.uint16)
