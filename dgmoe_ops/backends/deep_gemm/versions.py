"""Which DeepGEMM is installed, and which one would fit: its wheels are each built for one torch and
say so nowhere in their metadata."""

from __future__ import annotations

import importlib.metadata

import torch

#: torch release -> the sgl-deep-gemm that fits it, and what else must be pinned.
WHEELS = {
    (2, 11): ("0.1.5.post1", ("apache-tvm-ffi==0.1.11",)),
    (2, 13): ("0.2.0", ("apache-tvm-ffi==0.1.11",)),
    (2, 14): ("0.2.3.post2", ()),
}

#: Distributions that bring the module `deep_gemm`: the packaged one, and upstream's own.
DISTRIBUTIONS = ("sgl-deep-gemm", "deep-gemm")

#: The first release that binds through TORCH_LIBRARY; the ones before bind through apache-tvm-ffi.
TORCH_LIBRARY_SINCE = (0, 2, 3)


def version() -> str | None:
    """Name the installed DeepGEMM, as `sgl-deep-gemm 0.1.5.post1`, without importing it.

    None where there is none.
    """
    for name in DISTRIBUTIONS:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def binding(found: str | None) -> str:
    """Say how a release, as `version` names it, binds to Python: "tvm-ffi", "TORCH_LIBRARY" or
    "pybind11" (upstream)."""
    name, _, release = (found or "").partition(" ")
    if name != DISTRIBUTIONS[0]:
        return "pybind11"
    numbers = tuple(int(part) for part in release.split(".")[:3] if part.isdigit())
    return "TORCH_LIBRARY" if numbers >= TORCH_LIBRARY_SINCE else "tvm-ffi"


def fitting_wheel(torch_version: str) -> tuple[str, tuple[str, ...]] | None:
    """Look up the sgl-deep-gemm release, and its extra pins, that fits this torch.

    None where none is known.
    """
    major, minor = torch_version.split("+")[0].split(".")[:2]
    return WHEELS.get((int(major), int(minor)))


def misfit_message(torch_version: str, found: str | None, reason: str) -> str:
    """Say in one sentence what was found, what went wrong, which wheel fits and how to get it."""
    start = (
        "dgmoe_ops: grouped GEMMs on CUDA need a DeepGEMM built for this torch; found torch"
        f" {torch_version} and {found or 'no DeepGEMM'} ({reason}); "
    )
    wheel = fitting_wheel(torch_version)
    if wheel is None:
        pairs = ", ".join(f"torch {a}.{b} with {w}" for (a, b), (w, _) in sorted(WHEELS.items()))
        return start + f"no wheel is known to fit it, the known pairs of sgl-deep-gemm are {pairs}"
    release, pins = wheel
    command = " ".join(["pip install", f"sgl-deep-gemm=={release}", *pins])
    return start + f"sgl-deep-gemm {release} fits: {command}"


def misfit(reason: str) -> RuntimeError:
    return RuntimeError(misfit_message(torch.__version__, version(), reason))
