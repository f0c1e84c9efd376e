"""A bar on long work: by rich, else by tqdm, else none; both are optional."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def steps(total: int, text: str, wanted: bool) -> Iterator[Callable[[], object]]:
    """Show a bar of `total` steps on stderr; yields what takes one step.

    Where it is not wanted, or stderr is no terminal, there is none.
    """
    if not wanted or total == 0 or not sys.stderr.isatty():
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
    except ModuleNotFoundError:
        with _tqdm(total, text) as advance:
            yield advance
        return
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def _tqdm(total: int, text: str) -> Iterator[Callable[[], object]]:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda: None
        return
    with tqdm(total=total, desc=text) as bar:
        yield bar.update
