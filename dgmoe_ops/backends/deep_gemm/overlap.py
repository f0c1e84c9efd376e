"""Overlap of the down GEMM with the combine: the GEMM signals finished tiles while it runs.

Offered where the installed library's masked GEMM takes the arguments; no release that is known to
fit does (0.1.5 to 0.2.5 do not), so the scope mostly says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .. import scopes
from ..request import Request
from ..scopes import OVERLAP_OP, Overlap
from .versions import version

_KEYWORDS = ("enable_overlap", "max_block_n", "signal")


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

    Give the combine its multiprocessors by `num_sms` around it. Another grouped GEMM in the scope,
    and one that DeepGEMM does not run, is refused: it would never signal.

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
    function = find_function(module, OVERLAP_OP)
    why = f"it has no function for {OVERLAP_OP}" if function is None else unsupported(function)
    if why is not None:
        raise RuntimeError(f"dgmoe_ops: overlap of the down GEMM is not available: {why}")
    with scopes.scope(overlap=Overlap(signal, max_block_n)) as settings:
        yield settings.overlap


@contextmanager
def arguments(function: Callable, request: Request) -> Iterator[Arguments]:
    """The further arguments of one call, and the way its result takes back to the scope."""
    overlap = scopes.current().overlap
    if overlap is None or request.op != OVERLAP_OP:
        yield Arguments()
        return
    more = Arguments(
        {"enable_overlap": True, "max_block_n": overlap.max_block_n, "signal": overlap.signal}
    )
    yield more
    overlap.result = more.result
