"""The tensors of a checkpoint by name, read from memory-mapped safetensors files."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch

from . import shards
from .names import fail, shortened

_INDEX = ".safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Info(NamedTuple):
    """What a file's header says of a tensor."""

    dtype: torch.dtype | str  #: the file's word for a dtype that torch or this module lacks
    shape: tuple[int, ...]


def _safe_open(path: Path):
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(
            'dgmoe_ops.load_moe_layer needs safetensors: pip install "safetensors>=0.6"'
        ) from e
    if path.is_dir():
        fail(str(path), "be a safetensors file", "a folder")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except OSError as e:
        raise type(e)(f"dgmoe_ops.load_moe_layer: {path} must be readable, got {e}") from e
    except SafetensorError as e:
        raise ValueError(f"dgmoe_ops.load_moe_layer: {path} must be safetensors, got {e}") from e


class Files:
    """A checkpoint: one file, an index, or a folder of files. Use it as a context manager.

    A file is opened when a tensor of it is first asked for. Nothing is read but what is asked for:
    tensors are views of the mapped file, so they take no memory of their own.

    Attributes:
        names: of all tensors.
        folder: in which the files are.
        missing: where a single file is given and its name counts others that belong to it, the
            first of those, present or not.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Find the files and read their names of tensors, or those of the index.

        Raises:
            ValueError: an index is malformed or leads out of its folder, a file is no safetensors
                file, or a tensor is in two files.
            FileNotFoundError: there is no such path, or a folder without an index lacks a shard.
        """
        self._open_files: dict[Path, object] = {}
        self._stack = contextlib.ExitStack()
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"dgmoe_ops.load_moe_layer: no file or folder {path}")
        self.folder = path if path.is_dir() else path.parent
        self.missing: str | None = None
        try:
            self._file_of = self._find(path)
        except BaseException:
            self._stack.close()
            raise
        self.names = list(self._file_of)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception) -> None:
        self._open_files.clear()
        self._stack.close()

    def _find(self, path: Path) -> dict[str, Path]:
        """The file of every tensor."""
        if not path.is_dir():
            if path.name.endswith(_INDEX):
                return self._indexed(path)
            self.missing = next(iter(shards.siblings_missing([path])), None)
            return self._listed([path])
        index = path / f"model{_INDEX}"
        others = sorted(path.glob(f"*{_INDEX}"))
        if index.exists() or len(others) == 1:
            return self._indexed(index if index.exists() else others[0])
        files = sorted(path.glob("*.safetensors"))
        if not files:
            fail("path", "hold safetensors files or their index", path)
        shards.check_whole(path, files)
        return self._listed(files)

    def _indexed(self, index: Path) -> dict[str, Path]:
        if not index.is_file():
            fail(str(index), "be a file", "a folder" if index.is_dir() else "something else")
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            fail(str(index), "be JSON with a weight_map from names to files", repr(e))
        return shards.indexed(index, weight_map)

    def _listed(self, files: list[Path]) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for file in files:
            names = list(self._open(file).keys())
            twice = [name for name in names if name in found]
            if twice:
                must = f"be in one file, but {shortened(twice)} is in {found[twice[0]]}"
                fail("a tensor", must, f"{file} too")
            found |= dict.fromkeys(names, file)
        return found

    def _open(self, path: Path):
        file = self._open_files.get(path)
        if file is None:
            file = self._stack.enter_context(_safe_open(path))
            self._open_files[path] = file
        return file

    def _slice(self, name: str):
        path = self._file_of[name]
        if not path.exists():
            raise FileNotFoundError(
                f"dgmoe_ops.load_moe_layer: {name} must be in {path}, as the index says, but there"
                " is no such file"
            )
        try:
            return self._open(path).get_slice(name)
        except Exception as e:
            if type(e).__name__ != "SafetensorError":
                raise
            fail(name, f"be in {path}, as the index says", e)

    def info(self, name: str) -> Info:
        """Dtype and shape of a tensor, from the header."""
        found = self._slice(name)
        dtype = found.get_dtype()
        return Info(_DTYPES.get(dtype, dtype), tuple(found.get_shape()))

    def read(self, name: str, *index: int | slice) -> torch.Tensor:
        """A part of a tensor, where the file is mapped; a copy where that is off its alignment."""
        if index:
            part = self._slice(name)[index]
        else:
            part = self._open(self._file_of[name]).get_tensor(name)
        return part.clone() if part.data_ptr() % part.element_size() else part
