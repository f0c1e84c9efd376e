"""The files that a checkpoint consists of, told by their names: shards of a count, entries of an
index."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from .names import fail, shortened

# model-00001-of-00002.safetensors; both numbers need not have the same width.
_SHARD = re.compile(r"(.*?)([0-9]+)-of-([0-9]+)(.*)", re.DOTALL)
_SEPARATOR = re.compile(r"[/\\]")


def siblings_missing(files: Iterable[Path]) -> list[str]:
    """The first missing file of each set of shards that is not whole, as its other names have it.

    Raises:
        ValueError: a shard's number is above its count.
    """
    sets: dict[tuple[str, str, str], dict[int, Path]] = {}
    for file in files:
        if shard := _SHARD.fullmatch(file.name):
            before, number, count, after = shard.groups()
            sets.setdefault((before, count, after), {})[int(number)] = file
    missing = []
    for (before, count, after), found in sets.items():
        first = 0 if 0 in found else 1
        last = first + int(count) - 1
        if max(found) > last:
            must = f"be numbered {first} to {last}, as the count in their names says"
            fail("shards", must, found[max(found)])
        if len(found) <= last - first:
            number = next(n for n in range(first, last + 1) if n not in found)
            width = len(_SHARD.fullmatch(next(iter(found.values())).name)[2])
            missing.append(f"{before}{number:0{width}}-of-{count}{after}")
    return missing


def indexed(index: Path, weight_map: object) -> dict[str, Path]:
    """The file of every tensor that an index names.

    Told from the names alone: no entry may lead out of the folder of the index, under the rules of
    any system, or name a folder.

    Raises:
        ValueError: an entry does so, or the index has none of the form.
    """
    if not isinstance(weight_map, dict):
        must = "be JSON with a weight_map from names to files"
        fail(str(index), must, f"one of type {type(weight_map).__name__}")
    paths: dict[str, Path] = {}
    for name, file in weight_map.items():
        entry = f"weight_map[{name!r}] of {index}"
        if not isinstance(file, str):
            fail(entry, "be the name of a file", repr(file))
        if file not in paths:
            paths[file] = _inside(index.parent, entry, file)
    return {name: paths[file] for name, file in weight_map.items()}


def _inside(folder: Path, entry: str, file: str) -> Path:
    parts = _SEPARATOR.split(file)
    absolute = parts[0] == "" or re.match(r"[A-Za-z]:", parts[0]) is not None
    if absolute or ".." in parts or parts[-1] in ("", ".") or "\0" in file:
        fail(entry, "name a file in the folder of the index or below it", repr(file))
    path = folder / file
    if path.is_dir():
        fail(entry, "name a file", f"{file!r}, which is a folder")
    return path


def check_whole(folder: Path, files: list[Path]) -> None:
    """Refuse a folder without an index that lacks a shard.

    Raises:
        FileNotFoundError: it does.
    """
    if missing := siblings_missing(files):
        raise FileNotFoundError(
            f"dgmoe_ops.load_moe_layer: {folder} must have every shard that the names of the others"
            f" count, got it without {shortened(missing)}"
        )
