"""The library's process-global switches, set around each call to what the thread's scopes ask.

The library keeps one value of each for the whole process: they are set before a call and put back
after it, under a lock, so that threads do not see each other's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

from ..scopes import Settings
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
_lock = threading.RLock()


@contextmanager
def applied(module: ModuleType, settings: Settings) -> Iterator[None]:
    """Set the library's switches to `settings`, and put back what they were, also on an error.

    Raises:
        RuntimeError: the installed library has no such switch.
    """
    values = {name: getattr(settings, name) for name in SWITCHES}
    wanted = {name: value for name, value in values.items() if value is not None}
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
