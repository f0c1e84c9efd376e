"""The dynamic symbols of an ELF64 shared object, read without binutils."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_SHT_DYNAMIC, _SHT_DYNSYM = 6, 11
_DT_NEEDED = 1
_SHT_VERSYM, _SHT_VERNEED = 0x6FFFFFFF, 0x6FFFFFFE


@dataclass(frozen=True)
class Symbol:
    name: str
    defined: bool
    weak: bool
    version: str | None  # that of the library that must provide it


@dataclass(frozen=True)
class SharedObject:
    symbols: tuple[Symbol, ...]
    needed: tuple[str, ...]

    def undefined(self) -> list[Symbol]:
        return [symbol for symbol in self.symbols if not symbol.defined]

    def exported(self) -> set[str]:
        return {symbol.name for symbol in self.symbols if symbol.defined}


class _Reader:
    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        assert self.data[:6] == b"\x7fELF\x02\x01", f"{path} is no little-endian ELF64 file"
        offset = struct.unpack_from("<Q", self.data, 40)[0]
        size, count = struct.unpack_from("<HH", self.data, 58)
        # name, type, flags, address, offset, size, link, info, alignment, entry size
        self.sections = [
            struct.unpack_from("<IIQQQQIIQQ", self.data, offset + i * size) for i in range(count)
        ]

    def text(self, strings: tuple, at: int) -> str:
        start = strings[4] + at
        return self.data[start : self.data.index(b"\0", start)].decode()

    def find(self, kind: int) -> tuple | None:
        return next((section for section in self.sections if section[1] == kind), None)

    def needed(self) -> tuple[str, ...]:
        section = self.find(_SHT_DYNAMIC)
        entries = struct.iter_unpack("<qQ", self.data[section[4] : section[4] + section[5]])
        strings = self.sections[section[6]]
        return tuple(self.text(strings, value) for tag, value in entries if tag == _DT_NEEDED)

    def versions(self) -> dict[int, str]:
        """Version index -> name, of the versions that this object needs."""
        section = self.find(_SHT_VERNEED)
        names: dict[int, str] = {}
        if section is None:
            return names
        strings = self.sections[section[6]]
        at = section[4]
        while True:
            _, count, _, first, following = struct.unpack_from("<HHIII", self.data, at)
            entry = at + first
            for _ in range(count):
                _, _, index, name, step = struct.unpack_from("<IHHII", self.data, entry)
                names[index] = self.text(strings, name)
                entry += step
            if following == 0:
                return names
            at += following

    def symbols(self) -> tuple[Symbol, ...]:
        section = self.find(_SHT_DYNSYM)
        strings = self.sections[section[6]]
        versym = self.find(_SHT_VERSYM)
        names = self.versions()
        found = []
        for i in range(1, section[5] // 24):
            name, info, _, index, _, _ = struct.unpack_from(
                "<IBBHQQ", self.data, section[4] + i * 24
            )
            version = None
            if versym is not None:
                number = struct.unpack_from("<H", self.data, versym[4] + 2 * i)[0] & 0x7FFF
                version = names.get(number)
            found.append(Symbol(self.text(strings, name), index != 0, info >> 4 == 2, version))
        return tuple(found)


def read_shared_object(path: Path) -> SharedObject:
    """Return the dynamic symbols and the needed libraries of `path`."""
    reader = _Reader(path)
    return SharedObject(reader.symbols(), reader.needed())
