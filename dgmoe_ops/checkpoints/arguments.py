"""The types of `load_moe_layer`'s arguments: errors name the argument and what it is."""

from __future__ import annotations

import operator
import os

import torch

from .names import fail


def _got(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"


def path(arg: str, value: object) -> str:
    """A path that is not empty, which would name the current folder."""
    found = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(found, str):
        fail(arg, "be a string or a path", _got(value))
    if not found:
        fail(arg, "name a file or a folder", repr(value))
    return found


def text(arg: str, value: object, *, optional: bool = False) -> None:
    if not (isinstance(value, str) or (optional and value is None)):
        fail(arg, f"be a string{' or None' if optional else ''}", _got(value))


def _integer(value: object) -> int | None:
    """What counts as an int, NumPy's for example; no bool, and no tensor."""
    if isinstance(value, bool | torch.Tensor):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def number(arg: str, value: object, *, least: int | None = None, optional: bool = False) -> None:
    if optional and value is None:
        return
    found = _integer(value)
    if found is None:
        fail(arg, f"be an int{' or None' if optional else ''}", _got(value))
    if least is not None and found < least:
        fail(arg, f"be at least {least}", found)


def span(arg: str, value: object) -> range | None:
    """(start, stop) as a range, None as it is."""
    if value is None:
        return None
    ends = [_integer(end) for end in value] if isinstance(value, tuple | list) else []
    if len(ends) != 2 or None in ends:
        fail(arg, "be (start, stop), two ints, or None", _got(value))
    return range(*ends)


def flag(arg: str, value: object) -> None:
    if not isinstance(value, bool):
        fail(arg, "be True or False", _got(value))


def device(arg: str, value: object) -> torch.device:
    """A device that is there.

    Raises:
        ValueError: it is no device, or neither a CPU nor a GPU.
        RuntimeError: it is a GPU that PyTorch does not see.
    """
    try:
        found = torch.device(value)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        fail(arg, "be a CPU or a CUDA device", _got(value))
    count = torch.cuda.device_count() if found.type == "cuda" else 1
    if (found.index or 0) >= count:
        raise RuntimeError(
            f"dgmoe_ops.load_moe_layer: {arg} must be there, got {found}, and torch"
            f" {torch.__version__} sees {count} GPUs"
        )
    return found
