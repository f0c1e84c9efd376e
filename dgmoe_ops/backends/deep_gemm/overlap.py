"""Overlap of the down GEMM with the combine: the GEMM signals finished tiles while it runs.

Offered where the installed library's masked GEMM takes the arguments; no release that is known to
fit does (0.1.5 to 0.2.5 do not), so the scope mostly says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..request import Request
from . import scopes
from .versions import version

_OP = "grouped_gemm_nt_f8f8bf16_masked"
_KEYWORDS = ("enable_overlap", "max_block_n", "signal")
_thread = threading.local()


@dataclass
class Overlap:
    """What a masked GEMM inside the scope is told and what it tells.

    Attributes:
        signal: (experts * ceil(m / 64),) int32 zeros on the device: finished tiles a block of rows.
        max_block_n: the widest tile of columns, so that tiles finish often.
        result: what the library returned, (block_m, threshold) where it does.
    """

    signal: torch.Tensor
    max_block_n: int = 256
    result: object = None


@dataclass
class Arguments:
    """Further keyword arguments of one call, and where its result goes."""

    kwargs: dict = field(default_factory=dict)
    result: object = None


def unsupported(function: Callable) -> str | None:
    """Say why the library's masked GEMM cannot overlap; None where it can."""
    from .library import lacking

    missing = lacking(function, _KEYWORDS, unknown=_KEYWORDS)
    if not missing:
        return None
    name = getattr(function, "__name__", "its masked GEMM")
    found = version() or "the installed DeepGEMM"
    return f"{name} of {found} takes no {', '.join(missing)}"


@contextmanager
def down_gemm_overlap(signal: torch.Tensor, max_block_n: int = 256) -> Iterator[Overlap]:
    """Let the masked fp8 GEMMs of this thread signal finished tiles, within a `with`.

    Give the combine its multiprocessors by `num_sms` around it.

    Args:
        signal: (experts * ceil(m / 64),) int32 zeros on the GEMM's device.
        max_block_n: the widest tile of columns, a positive multiple of 8.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: the installed library does not take the arguments; the message says which.
    """
    from .library import find_function, load

    if signal.dtype != torch.int32 or signal.dim() != 1 or not signal.is_contiguous():
        raise ValueError(
            "dgmoe_ops.down_gemm_overlap: signal must be contiguous int32 with one dimension, got"
            f" {signal.dtype} with shape {tuple(signal.shape)}"
        )
    if max_block_n <= 0 or max_block_n % 8:
        raise ValueError(
            "dgmoe_ops.down_gemm_overlap: max_block_n must be a positive multiple of 8, got"
            f" {max_block_n}"
        )
    module = load()
    function = find_function(module, _OP)
    why = f"it has no function for {_OP}" if function is None else unsupported(function)
    if why is not None:
        raise RuntimeError(f"dgmoe_ops: overlap of the down GEMM is not available: {why}")
    before = getattr(_thread, "overlap", None)
    _thread.overlap = Overlap(signal, max_block_n)
    # A direct call would not know of the further arguments.
    scopes.tell_native(1, scopes.current())
    try:
        yield _thread.overlap
    finally:
        _thread.overlap = before
        scopes.tell_native(-1, scopes.current())


def active() -> bool:
    """Whether this thread is in the scope."""
    return getattr(_thread, "overlap", None) is not None


@contextmanager
def arguments(function: Callable, request: Request) -> Iterator[Arguments]:
    """The further arguments of one call, and the way its result takes back to the scope."""
    scope = getattr(_thread, "overlap", None)
    if scope is None or request.op != _OP:
        yield Arguments()
        return
    more = Arguments(
        {"enable_overlap": True, "max_block_n": scope.max_block_n, "signal": scope.signal}
    )
    yield more
    scope.result = more.result
