"""The library's process-global switches as scopes.

The library keeps one value of each for the whole process. Here each thread has its own, which is
set before each of its calls and put back after it, under a lock: threads do not see each other's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import torch

from .versions import version


class Switch(NamedTuple):
    """A process-global value of the library: how it is read and set."""

    read: str
    write: str


SWITCHES = {
    "alignment": Switch(
        "get_mk_alignment_for_contiguous_layout", "set_mk_alignment_for_contiguous_layout"
    ),
    "num_sms": Switch("get_num_sms", "set_num_sms"),
    "pdl": Switch("get_pdl", "set_pdl"),
}


@dataclass(frozen=True)
class Settings:
    """What the scopes that a thread is in ask for; None keeps what the library has."""

    alignment: int | None = None
    num_sms: int | None = None
    pdl: bool | None = None


_DEFAULT = Settings()
_thread = threading.local()
_lock = threading.RLock()


def current() -> Settings:
    """The settings of this thread."""
    return getattr(_thread, "settings", _DEFAULT)


def tell_native(entered: int, settings: Settings) -> None:
    """Keep the direct calls of every thread away while some thread is in a scope."""
    if hasattr(torch.ops.dgmoe, "_deep_gemm_scope"):
        torch.ops.dgmoe._deep_gemm_scope(entered, hash(settings) if settings != _DEFAULT else 0)


@contextmanager
def _scope(**changes: int | bool) -> Iterator[None]:
    before = current()
    _thread.settings = replace(before, **changes)
    tell_native(1, _thread.settings)
    try:
        yield
    finally:
        _thread.settings = before
        tell_native(-1, before)


def _check_int(name: str, arg: str, value: object, must: str, holds: Callable[[int], bool]) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not holds(value):
        raise ValueError(f"dgmoe_ops.{name}: {arg} must {must}, got {value!r}")


def contiguous_alignment(rows: int):
    """Pad the segments of the contiguous layout to `rows` rows, in this thread, within a `with`.

    Args:
        rows: 32, 64, 96 or 128; which of them run depends on the architecture (SM90: 128).

    Raises:
        ValueError: rows is another number.
    """
    _check_int(
        "contiguous_alignment",
        "rows",
        rows,
        "be 32, 64, 96 or 128",
        lambda r: r in (32, 64, 96, 128),
    )
    return _scope(alignment=rows)


def num_sms(count: int):
    """Let the GEMMs of this thread use `count` multiprocessors, within a `with`.

    Args:
        count: at least 1; at most what the device has, which the first call checks.

    Raises:
        ValueError: count is below 1.
    """
    _check_int("num_sms", "count", count, "be at least 1", lambda c: c >= 1)
    return _scope(num_sms=count)


def pdl(enabled: bool):
    """Turn programmatic dependent launch of the GEMMs of this thread on or off, within a `with`.

    Raises:
        ValueError: enabled is no bool.
    """
    if not isinstance(enabled, bool):
        raise ValueError(f"dgmoe_ops.pdl: enabled must be True or False, got {enabled!r}")
    return _scope(pdl=enabled)


@contextmanager
def applied(module: ModuleType, settings: Settings) -> Iterator[None]:
    """Set the library's switches to `settings`, and put back what they were, also on an error.

    Raises:
        RuntimeError: the installed library has no such switch.
    """
    wanted = {name: value for name, value in vars(settings).items() if value is not None}
    if not wanted:
        yield
        return
    with _lock:
        before = {}
        try:
            for name, value in wanted.items():
                read, write = (_find(module, function) for function in SWITCHES[name])
                if read is None or write is None:
                    raise RuntimeError(
                        f"dgmoe_ops: {version() or 'the installed DeepGEMM'} has no"
                        f" {SWITCHES[name].write}, so the scope {name} cannot be entered"
                    )
                before[name] = (write, read())
                write(value)
            yield
        finally:
            for write, value in before.values():
                write(value)


def _find(module: ModuleType, name: str) -> Callable | None:
    """A function of the library, or of its layout utilities."""
    for place in (module, getattr(getattr(module, "utils", None), "layout", None)):
        if hasattr(place, name):
            return getattr(place, name)
    return None
