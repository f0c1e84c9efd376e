"""What is on this machine, found without importing a GEMM library."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import config
from .._load import LIBRARIES
from ..backends import deep_gemm
from ..backends.deep_gemm import jit_cache


@dataclass(frozen=True)
class Device:
    """One CUDA device."""

    name: str
    arch: int
    memory_bytes: int


@dataclass(frozen=True)
class Setting:
    """One `DGMOE_*` variable: its value, or why the one that is set is none."""

    name: str
    default: str
    value: str | None
    error: str | None


@dataclass(frozen=True)
class Machine:
    """The facts that a diagnosis rests on; tests make up machines that they do not have.

    Attributes:
        torch, torch_cuda: versions; torch_cuda is None in a build for CPU.
        devices: the CUDA devices that PyTorch sees.
        driver: whether an NVIDIA driver is there, seen by PyTorch or not.
        libraries: the loaded libraries of the package.
        deep_gemm: the installed distribution and version, or None.
        triton: the installed version, or None.
        pins: versions of what the fitting wheel pins, None where not installed.
        nvcc: its path, or None; nvcc_version: its release.
        jit_cache: the folder in which DeepGEMM keeps its compiled kernels.
        jit_kernels: how many are in it.
        jit_compiler: what it compiles with, "nvcc" or "NVRTC".
        settings: every variable of `config`.
    """

    python: str
    torch: str
    torch_cuda: str | None
    devices: tuple[Device, ...]
    driver: bool
    libraries: tuple[str, ...]
    deep_gemm: str | None
    triton: str | None
    pins: dict[str, str | None]
    nvcc: str | None
    nvcc_version: str | None
    jit_cache: str
    jit_kernels: int
    jit_compiler: str
    settings: tuple[Setting, ...]


def _find_nvcc() -> str | None:
    """The nvcc that the build would take."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for home in homes:
        if home and (Path(home) / "bin" / "nvcc").exists():
            return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc")


def _nvcc_version(nvcc: str | None) -> str | None:
    if nvcc is None:
        return None
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release ([\d.]+)", text.stdout)
    return found.group(1) if found else None


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[Device, ...]:
    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = properties.major * 10 + properties.minor
        found.append(Device(properties.name, arch, properties.total_memory))
    return tuple(found)


def read_settings() -> tuple[Setting, ...]:
    """Read every variable of `config`; one that holds no legal value says so."""
    read = []
    for variable in config.VARIABLES:
        try:
            value = variable.read()
        except ValueError as error:
            read.append(Setting(variable.name, variable.default, None, str(error)))
            continue
        text = str(int(value) if isinstance(value, bool) else value)
        text = variable.default if value is None else text
        read.append(Setting(variable.name, variable.default, text, None))
    return tuple(read)


def _or_none(read: Callable[[], object]) -> object:
    """What a variable says; None too where it holds no legal value, which its setting tells."""
    try:
        return read()
    except ValueError:
        return None


def look() -> Machine:
    """Look at this machine."""
    wheel = deep_gemm.fitting_wheel(torch.__version__)
    pins = wheel[1] if wheel else ()
    nvcc = _find_nvcc()
    folder = Path(config.jit_cache_dir() or jit_cache.folder())
    chosen = _or_none(config.jit_nvrtc)
    nvrtc = jit_cache.uses_nvrtc() if chosen is None else chosen
    return Machine(
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        devices=_devices(),
        driver=Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None,
        libraries=LIBRARIES,
        deep_gemm=deep_gemm.version(),
        triton=_installed("triton"),
        pins={pin: _installed(pin.split("==")[0]) for pin in pins},
        nvcc=nvcc,
        nvcc_version=_nvcc_version(nvcc),
        jit_cache=str(folder),
        jit_kernels=len(jit_cache.kernels(folder)),
        jit_compiler="NVRTC" if nvrtc else "nvcc",
        settings=read_settings(),
    )
