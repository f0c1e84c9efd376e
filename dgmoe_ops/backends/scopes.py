"""What a caller asks of the GEMMs of its thread, as scopes: multiprocessors, alignment, PDL,
overlap.

Each thread has its own settings, and no backend keeps them for longer than a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ..formats.layout import Layout
from ..formats.layouts import CONTIG_ALIGNMENT
from .request import Request, refuse

_ALIGNMENTS = (32, 64, 96, 128)
#: The op that signals finished tiles in `down_gemm_overlap`.
OVERLAP_OP = "grouped_gemm_nt_f8f8bf16_masked"


@dataclass
class Overlap:
    """What a masked GEMM inside `down_gemm_overlap` is told and what it tells.

    Attributes:
        signal: (experts * ceil(m / 64),) int32 zeros on the device: finished tiles a block of rows.
        max_block_n: the widest tile of columns, so that tiles finish often.
        result: what the library returned, (block_m, threshold) where it does.
    """

    signal: torch.Tensor
    max_block_n: int = 256
    result: object = None


@dataclass(frozen=True)
class Settings:
    """What the scopes that a thread is in ask for; None keeps what the backend has."""

    alignment: int | None = None
    num_sms: int | None = None
    pdl: bool | None = None
    overlap: Overlap | None = None


_DEFAULT = Settings()
_thread = threading.local()


def current() -> Settings:
    """The settings of this thread."""
    return getattr(_thread, "settings", _DEFAULT)


def tell_native(entered: int, settings: Settings) -> None:
    """Hand this thread's settings to the C++ side, and keep the direct calls of every thread away
    while some thread is in a scope."""
    if hasattr(torch.ops.dgmoe, "_gemm_scope"):
        torch.ops.dgmoe._gemm_scope(
            entered,
            settings.alignment or 0,
            settings.num_sms or 0,
            -1 if settings.pdl is None else int(settings.pdl),
            settings.overlap is not None,
        )


@contextmanager
def scope(**changes: object) -> Iterator[Settings]:
    """Change settings of this thread, within a `with`."""
    before = current()
    _thread.settings = replace(before, **changes)
    tell_native(1, _thread.settings)
    try:
        yield _thread.settings
    finally:
        _thread.settings = before
        tell_native(-1, before)


def _check_int(name: str, arg: str, value: object, must: str, holds: Callable[[int], bool]) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not holds(value):
        raise ValueError(f"dgmoe_ops.{name}: {arg} must {must}, got {value!r}")


def contiguous_alignment(rows: int):
    """Pad the segments of the contiguous layout to `rows` rows, in this thread, within a `with`.

    Masked GEMMs are not changed.

    Args:
        rows: 32, 64, 96 or 128; which of them run depends on the architecture (SM90: 128). A GEMM
            refuses another one.

    Raises:
        ValueError: rows is another number.
    """
    _check_int(
        "contiguous_alignment", "rows", rows, "be 32, 64, 96 or 128", lambda r: r in _ALIGNMENTS
    )
    return scope(alignment=rows)


def num_sms(count: int):
    """Let the GEMMs of this thread use `count` multiprocessors, within a `with`.

    A GEMM launches no more CTAs than fit on so many at once. The MX kernels on SM90 whose CTAs work
    in clusters of two launch an even number, at least one cluster.

    Args:
        count: at least 1; at most what the device has, which the first call checks.

    Raises:
        ValueError: count is below 1.
    """
    _check_int("num_sms", "count", count, "be at least 1", lambda c: c >= 1)
    return scope(num_sms=count)


def pdl(enabled: bool):
    """Turn programmatic dependent launch of the GEMMs of this thread on or off, within a `with`.

    The MX kernels on SM90 are launched without it.

    Raises:
        ValueError: enabled is no bool.
    """
    if not isinstance(enabled, bool):
        raise ValueError(f"dgmoe_ops.pdl: enabled must be True or False, got {enabled!r}")
    return scope(pdl=enabled)


def overlap_active() -> bool:
    """Whether this thread is in `down_gemm_overlap`."""
    return current().overlap is not None


def settings_of(request: Request) -> Settings:
    """The settings that concern a request: the alignment is that of contiguous segments, where a
    masked GEMM would take it for the height of its tiles."""
    settings = current()
    if settings.alignment is not None and request.spec.layout is not Layout.CONTIG:
        settings = replace(settings, alignment=None)
    return settings


def alignment_of(request: Request) -> int:
    """Rows to which a request's segments are padded."""
    return settings_of(request).alignment or CONTIG_ALIGNMENT


def check(request: Request, arch: str, alignments: tuple[int, ...], overlaps: bool) -> None:
    """Check that a backend does what the scopes ask of a request.

    Args:
        request: a GEMM.
        arch: for people to read.
        alignments: of segments, that the backend takes.
        overlaps: whether its masked fp8 GEMM signals finished tiles.

    Raises:
        ValueError: an alignment that does not run, or more multiprocessors than the device has.
        RuntimeError: nobody would signal in an overlap.
    """
    settings = settings_of(request)
    alignment = settings.alignment
    if alignment is not None and alignment not in alignments:
        legal = ", ".join(map(str, alignments))
        raise refuse(request.op, "alignment", f"be one of {legal} on {arch}", alignment)
    device = request.operands.a.get_device()
    if settings.num_sms is not None and device >= 0:
        most = torch.cuda.get_device_properties(device).multi_processor_count
        if settings.num_sms > most:
            must = f"be at most {most}, the multiprocessors of the device"
            raise refuse(request.op, "num_sms", must, settings.num_sms)
    if settings.overlap is not None and request.spec.grouped and not overlaps:
        raise RuntimeError(
            f"dgmoe::{request.op}: overlap of the down GEMM is not available: this GEMM on {arch}"
            " would never signal; leave down_gemm_overlap for it"
        )
