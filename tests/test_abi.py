"""One build for every PyTorch from 2.10 on: what the libraries may ask of their machine."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from elf import SharedObject, read_shared_object

PACKAGE = Path(importlib.util.find_spec("dgmoe_ops").origin).parent  # found, not imported
INCLUDE = Path(torch.__file__).parent / "include" / "torch" / "csrc"
SHIM_HEADERS = (INCLUDE / "inductor/aoti_torch/c/shim.h", INCLUDE / "stable/c/shim.h")
FLOOR = (2, 10)
# Ceilings: what Ubuntu 22.04 has.
GLIBCXX_CEILING = (3, 4, 30)
GLIBC_CEILING = (2, 35)
FORBIDDEN = re.compile(r"^(_ZNK?2at|_ZNK?3c10|_ZNK?5torch|_Py|Py[A-Z])")


def library(name: str) -> SharedObject:
    path = PACKAGE / f"{name}.abi3.so"
    if not path.exists():
        pytest.skip(f"{path.name} was not built (no nvcc, or DGMOE_CUDA=0)")
    return read_shared_object(path)


@pytest.fixture(scope="module", params=["_C", "_C_cuda"])
def shared(request: pytest.FixtureRequest) -> SharedObject:
    return library(request.param)


def version_tuple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def guard_of(line: str) -> tuple[int, int] | None:
    found = re.search(r"TORCH_FEATURE_VERSION\s*>=\s*TORCH_VERSION_(\d+)_(\d+)", line)
    return (int(found[1]), int(found[2])) if found else None


def shims_at(floor: tuple[int, int]) -> set[str]:
    """The C shims that the installed headers declare for PyTorch `floor`."""
    names: set[str] = set()
    for header in SHIM_HEADERS:
        stack: list[tuple[int, int] | None] = []
        for line in header.read_text().splitlines():
            if re.match(r"\s*#\s*if", line):
                stack.append(guard_of(line))
            elif re.match(r"\s*#\s*endif", line):
                stack.pop()
            elif all(guard is None or guard <= floor for guard in stack):
                names.update(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", line))
    return names


def test_the_headers_are_read_right() -> None:
    floor, newest = shims_at(FLOOR), shims_at((2, 13))
    assert {"aoti_torch_get_dtype", "torch_parallel_for", "torch_c10_cuda_check_msg"} <= floor
    assert floor < newest or torch.__version__.startswith("2.10")


def test_only_stable_shims_and_the_system_are_needed(shared: SharedObject) -> None:
    allowed = shims_at(FLOOR)
    for symbol in shared.undefined():
        assert not FORBIDDEN.match(symbol.name), f"{symbol.name} is no part of the stable ABI"
        if symbol.name.startswith(("torch_", "aoti_torch_")):
            # aoti_torch_device_type_cpu and friends are declared by a macro.
            declared = symbol.name in allowed or "_device_type_" in symbol.name
            assert declared, f"{symbol.name} is newer than torch {FLOOR}, or no shim"
            continue
        system = symbol.version is not None and symbol.version.startswith(
            ("GLIBC_", "GLIBCXX_", "CXXABI_", "GCC_")
        )
        # Where a library of PyTorch exports a std symbol too, the linker records no version.
        assert system or symbol.weak or symbol.name.startswith(("_ZNSt", "_ZNKSt", "_ZSt")), symbol


def test_the_system_need_not_be_new(shared: SharedObject) -> None:
    for prefix, ceiling in (("GLIBCXX_", GLIBCXX_CEILING), ("GLIBC_", GLIBC_CEILING)):
        versions = [
            version_tuple(symbol.version[len(prefix) :])
            for symbol in shared.undefined()
            if symbol.version and re.fullmatch(prefix + r"[\d.]+", symbol.version)
        ]
        assert versions, f"no {prefix} symbol at all"
        assert max(versions) <= ceiling, f"needs {prefix}{max(versions)}"


def test_nothing_but_system_and_torch_libraries_are_needed(shared: SharedObject) -> None:
    allowed = re.compile(r"lib(torch|torch_cpu|c10|stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so|ld-linux")
    for name in shared.needed:
        assert allowed.match(name), f"needs {name}"


def test_the_two_libraries_share_no_symbol() -> None:
    common = library("_C").exported() & library("_C_cuda").exported()
    # The linker's own marks, and inline functions of the C++ library, whose duplicates are alike.
    ours = [
        name for name in common if not re.match(r"_(init|fini|edata|end|_bss_start)$|_Z\w*St", name)
    ]
    assert not ours


def test_our_symbols_are_hidden(shared: SharedObject) -> None:
    assert not [name for name in shared.exported() if "dgmoe" in name]


def test_the_cuda_library_needs_libtorch() -> None:
    assert "libtorch.so" in library("_C_cuda").needed


def test_import_touches_neither_cuda_nor_heavy_packages() -> None:
    script = (
        "import sys, torch, dgmoe_ops\n"
        "assert not torch.cuda.is_initialized(), 'import initialised CUDA'\n"
        "loaded = {'deep_gemm', 'triton', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, f'import loaded {loaded}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
