"""What long work says on stderr: a bar, by rich, else by tqdm, else none, and lines of text.

Both libraries are optional, and so is stderr: it may be None, closed, without `isatty`, or fail
when it is written to. Nothing that goes wrong with showing stops the work that is shown.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TextIO


class _Quiet:
    """A stream whose writing never fails: what it cannot write is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(Exception):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(Exception):
            self._stream.flush()


def _stderr() -> _Quiet | None:
    stream = sys.stderr
    return None if stream is None else _Quiet(stream)


def _is_terminal(stream: _Quiet | None) -> bool:
    try:
        return stream is not None and bool(stream.isatty())
    except Exception:  # closed, or without isatty
        return False


def say(text: object) -> None:
    """Write a line to stderr, where there is one."""
    stream = _stderr()
    if stream is not None:
        stream.write(f"{text}\n")
        stream.flush()


@contextlib.contextmanager
def steps(total: int, text: str, wanted: bool) -> Iterator[Callable[[], None]]:
    """Show a bar of `total` steps on stderr; yields what takes one step.

    Where it is not wanted, or stderr is no terminal, there is none.
    """
    stream = _stderr()
    shown = None
    if wanted and total and _is_terminal(stream):
        with contextlib.suppress(Exception):
            shown = _rich(total, text, stream) or _tqdm(total, text, stream)
    if shown is None:
        yield lambda: None
        return
    advance, close = shown

    def step() -> None:
        with contextlib.suppress(Exception):
            advance()

    try:
        yield step
    finally:
        with contextlib.suppress(Exception):
            close()


_Bar = tuple[Callable[[], object], Callable[[], object]]  # what takes a step, and what ends it


def _rich(total: int, text: str, stream: _Quiet) -> _Bar | None:
    try:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
    except ImportError:
        return None
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(file=stream))
    task = bar.add_task(text, total=total)
    try:
        bar.start()
    except BaseException:
        bar.stop()  # puts back the streams that it redirects
        raise
    return lambda: bar.advance(task), bar.stop


def _tqdm(total: int, text: str, stream: _Quiet) -> _Bar | None:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    bar = tqdm(total=total, desc=text, file=stream)
    return bar.update, bar.close
