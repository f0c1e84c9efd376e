"""Every `DGMOE_*` variable, its default and its meaning, in one place.

Read at call time, so tests can set them. Set to the empty string a variable is as unset. A switch
is on with 1, true, on or yes and off with 0, false, off or no, in any case; every other value is
refused by the variable's name. `csrc/common/env.h` reads switches alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .formats.layout import Layout

_ON, _OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


def _text(name: str, default: str) -> str:
    return os.environ.get(name) or default


def switch(name: str, default: bool) -> bool:
    """Read a variable that is on or off.

    Raises ValueError for a value that is neither.
    """
    text = _text(name, _ON[0] if default else _OFF[0])
    if text.lower() not in _ON + _OFF:
        raise ValueError(f"{name} must be one of {', '.join(_ON + _OFF)}, got {text!r}")
    return text.lower() in _ON


def layout_override() -> Layout | None:
    """`DGMOE_LAYOUT`: masked or contig in place of what `layout="auto"` would choose; auto or unset
    keeps the choice.

    Raises ValueError for any other value.
    """
    # Imported here because the build reads this file by itself.
    from .formats.layout import LAYOUT_ARGUMENTS, Layout

    value = _text("DGMOE_LAYOUT", "auto").lower()
    if value not in LAYOUT_ARGUMENTS:
        known = ", ".join(LAYOUT_ARGUMENTS)
        raise ValueError(f"DGMOE_LAYOUT must be one of {known}, got {value!r}")
    return None if value == "auto" else Layout(value)


def masked_memory_fraction() -> float:
    """`DGMOE_MASKED_MEMORY_FRACTION` (default 0.25): share of the device's memory that a masked
    slab may take.

    A share of the total memory, not of what is free: the choice is then the same in every call,
        captured or not.
    Raises ValueError outside (0, 1].
    """
    text = _text("DGMOE_MASKED_MEMORY_FRACTION", "0.25")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise ValueError(f"DGMOE_MASKED_MEMORY_FRACTION must be in (0, 1], got {text!r}")
    return value


def batch_invariant() -> bool:
    """`DGMOE_BATCH_INVARIANT` (default 0): 1 keeps the CPU GEMMs to their own summation.

    A row then has the same bits at any row count and with any number of threads. By default many
    rows an expert go to the machine's matrix product, whose order of summation may depend on
    their number. The C++ library reads the variable itself, at every call.

    It does not reach CUDA. There a row has the same bits at any row count on SM90, but for the MX
    recipes: three kernels take them, up to 14 expected rows an expert, up to 72 and above, and
    they may round differently.
    """
    return switch("DGMOE_BATCH_INVARIANT", False)


def sanity_check() -> bool:
    """`DGMOE_SANITY_CHECK` (default 0): 1 looks at the contents of tensors before they are used.

    Every index tensor of every op, on CPU and CUDA: ids, token ids and expert maps, masked_m,
    m_indices, rows to combine. Before a library's GEMM also aligned segments, and scales that are
    powers of two where the tensor core takes exponents. The first offending element is named. Waits
    for the device, so nothing is looked at while a graph is captured.
    """
    return switch("DGMOE_SANITY_CHECK", False)


def native_calls() -> bool:
    """`DGMOE_NATIVE_CALLS` (default 1): 0 calls DeepGEMM through its Python functions only.

    Otherwise C++ calls it directly where the release allows that, which saves host time. Read when
    an op calls it for the first time.
    """
    return switch("DGMOE_NATIVE_CALLS", True)


def jit_cache_dir() -> str | None:
    """`DGMOE_JIT_CACHE_DIR`: folder in which DeepGEMM keeps the kernels that it has compiled; auto
    or unset leaves it to `DG_JIT_CACHE_DIR`, else to the library (`~/.deep_gemm`)."""
    value = _text("DGMOE_JIT_CACHE_DIR", "auto")
    return None if value == "auto" else value


def jit_nvrtc() -> bool | None:
    """`DGMOE_JIT_NVRTC`: on lets DeepGEMM compile with NVRTC, off with nvcc; auto or unset leaves
    it to `DG_JIT_USE_NVRTC`, else to the library (nvcc).

    Raises ValueError for any other value.
    """
    text = _text("DGMOE_JIT_NVRTC", "auto")
    if text.lower() == "auto":
        return None
    try:
        return switch("DGMOE_JIT_NVRTC", False)
    except ValueError as error:
        values = ", ".join(("auto", *_ON, *_OFF))
        raise ValueError(f"DGMOE_JIT_NVRTC must be one of {values}, got {text!r}") from error


def exact_activation() -> bool:
    """`DGMOE_EXACT_ACTIVATION` (default 0): 1 gives activations on CUDA the bits of the CPU.

    By default the hardware approximates exponential and quotient: of 10^4 e4m3 values at most one
    is off, by one step. The C++ library reads the variable itself, at every call.
    """
    return switch("DGMOE_EXACT_ACTIVATION", False)


class Variable(NamedTuple):
    """One variable: its name, what it is when unset, and who reads it."""

    name: str
    default: str
    read: Callable[[], object]


VARIABLES = (
    Variable("DGMOE_LAYOUT", "auto", layout_override),
    Variable("DGMOE_MASKED_MEMORY_FRACTION", "0.25", masked_memory_fraction),
    Variable("DGMOE_BATCH_INVARIANT", "0", batch_invariant),
    Variable("DGMOE_SANITY_CHECK", "0", sanity_check),
    Variable("DGMOE_NATIVE_CALLS", "1", native_calls),
    Variable("DGMOE_JIT_CACHE_DIR", "auto", jit_cache_dir),
    Variable("DGMOE_JIT_NVRTC", "auto", jit_nvrtc),
    Variable("DGMOE_EXACT_ACTIVATION", "0", exact_activation),
)
